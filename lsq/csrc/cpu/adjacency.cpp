// Edges of graphs, sorted by their targets, and those between chosen nodes.
#include "rows.h"

namespace {

// edges [2, E], sources above targets -> indptr [N + 1], indices [E]: a counting sort that keeps
// the order of each target's sources. outside [1]: the first edge with an index not below N, or -1.
template <class Index>
void sort_edges(const Index* edges, int64_t count, int64_t nodes, int32_t* indptr, int32_t* indices,
                int64_t* outside) {
    const Index *sources = edges, *targets = edges + count;
    const uint64_t bound = nodes;
    std::fill(indptr, indptr + nodes + 1, 0);
    for (int64_t edge = 0; edge < count; ++edge) {
        // Negative indices are large ones without a sign.
        const auto source = static_cast<uint64_t>(static_cast<int64_t>(sources[edge]));
        const auto target = static_cast<uint64_t>(static_cast<int64_t>(targets[edge]));
        if (source >= bound || target >= bound) {
            outside[0] = edge;
            return;
        }
        ++indptr[target + 1];
    }
    outside[0] = -1;
    for (int64_t node = 0; node < nodes; ++node) indptr[node + 1] += indptr[node];
    std::vector<int32_t> next(indptr, indptr + nodes);
    for (int64_t edge = 0; edge < count; ++edge)
        indices[next[targets[edge]]++] = static_cast<int32_t>(sources[edge]);
}

}  // namespace

LSQ_EXPORT void lsq_sort_edges(const void* edges, int64_t wide, int64_t count, int64_t nodes,
                               int32_t* indptr, int32_t* indices, int64_t* outside) {
    if (wide)
        sort_edges(static_cast<const int64_t*>(edges), count, nodes, indptr, indices, outside);
    else
        sort_edges(static_cast<const int32_t*>(edges), count, nodes, indptr, indices, outside);
}

// Edges between chosen nodes [n], in their order. positions [N]: where a node is among the chosen,
// or -1 -> begins [n + 1], kept [their edges, at most].
LSQ_EXPORT void lsq_subgraph(const int32_t* indptr, const int32_t* indices, const int64_t* chosen,
                             int64_t n, const int32_t* positions, int32_t* begins, int32_t* kept) {
    int32_t count = 0;
    for (int64_t row = 0; row < n; ++row) {
        begins[row] = count;
        for (int32_t edge = indptr[chosen[row]]; edge < indptr[chosen[row] + 1]; ++edge) {
            const int32_t source = positions[indices[edge]];
            if (source >= 0) kept[count++] = source;
        }
    }
    begins[n] = count;
}
