// Sums over the neighbours of nodes, with the epilogue of a graph layer, and their gradient.
//
// M nodes, COLUMNS columns; lsq/ops/aggregate.py is the reference. -DCODED=1: x is codes, 0: Float.
// LANES threads sum a node's rows, edge after edge, so that loads of a row are coalesced and float
// sums have the order of the edges. A warp reads 32 edges at once and several rows ahead. Hubs are
// not split: a node with many edges keeps its threads, but other warps go on.
#include "gradient.cuh"
#include "project_epilogue.cuh"

#ifndef CODED
#define CODED 1
#endif

namespace {

LSQ_INLINE float factor_of(const float* factor, int64_t row) { return factor ? factor[row] : 1.0f; }

LSQ_INLINE void add_row8(const Packed<int8_t>& row, float, int32_t (&sum)[kVector]) {
#pragma unroll
    for (int i = 0; i < kVector; ++i)
        sum[i] = __dp4a(static_cast<int32_t>(row.word[i / 4]), 1 << 8 * (i % 4), sum[i]);
}

template <class T>
LSQ_INLINE void add_row8(const Packed<T>& row, float factor, float (&sum)[kVector]) {
    float x[kVector];
    unpack8(row, x);
#pragma unroll
    for (int i = 0; i < kVector; ++i) sum[i] += x[i] * factor;
}

// Adds columns [column, column + 8) of the neighbours' rows of x, floats times their factors, which
// may be null. All threads of a warp must call this for the same row, also with columns beyond the
// last.
template <class T, class Sum>
LSQ_INLINE void sum_neighbours8(const T* x, const Edges& edges, int64_t row, int column,
                                const float* factors, Sum (&sum)[kVector]) {
    constexpr bool kScaled = sizeof(T) > 1;
    constexpr int kFlight = sizeof(T) == 4 ? 4 : 8;  // rows that are read ahead
    const int32_t *offsets = edges.indptr, *nodes = edges.indices;
    const int lane = threadIdx.x % kWarp;
    if (column - lane * kVector >= COLUMNS) return;  // the whole warp
    const int64_t end = offsets[row + 1];
    for (int64_t first = offsets[row]; first < end; first += kWarp) {
        const int count = end - first < kWarp ? static_cast<int>(end - first) : kWarp;
        const int32_t node = lane < count ? nodes[first + lane] : 0;
        const float factor = kScaled && lane < count ? factor_of(factors, node) : 1.0f;
#pragma unroll 1
        for (int edge = 0; edge < count; edge += kFlight) {
            Packed<T> rows[kFlight];
            float times[kFlight];
#pragma unroll
            for (int i = 0; i < kFlight; ++i) {
                if (edge + i >= count) continue;
                const int64_t from = __shfl_sync(kAllLanes, node, edge + i);
                times[i] = kScaled ? __shfl_sync(kAllLanes, factor, edge + i) : 1.0f;
                if (column < COLUMNS) rows[i] = load_packed(x + from * COLUMNS + column);
            }
#pragma unroll
            for (int i = 0; i < kFlight; ++i) {
                if (edge + i < count && column < COLUMNS) add_row8(rows[i], times[i], sum);
            }
        }
    }
}

}  // namespace

// blockIdx.y: which vectors of the rows.
LSQ_KERNEL __launch_bounds__(kThreads, CODED ? 3 : 2)
    lsq_aggregate(const Aggregate op, Out<uint32_t> ticket) {
    wait_for_launches();
#if CODED
    const int8_t* x = op.x.coded.codes;
    const float scale = op.x.coded.scale[0];
    using Value = int32_t;
#else
    const Float* x = op.x.floats;
    const float scale = 1.0f;
    using Value = float;
#endif
    const float *own = op.own, *factor = op.factor;
    const Float* root = op.root;
    const ProjectEnd end{op};
    const int column = column_of(blockIdx.y);
    Magnitude largest = 0;
    for (int64_t row = kRows * static_cast<int64_t>(blockIdx.x) + row_in_block(); row < op.rows;
         row += kRows * gridDim.x) {
        Value sum[kVector] = {};
        sum_neighbours8(x, op.edges, row, column, nullptr, sum);
        if (column >= COLUMNS) continue;
        const int64_t element = row * COLUMNS + column;
        float y[kVector], bias[kVector];
        scale8(sum, 1.0f, y);
        if (own) {
            Value value[kVector];
            load8(x + element, value);
#pragma unroll
            for (int i = 0; i < kVector; ++i) y[i] += own[0] * static_cast<float>(value[i]);
        }
        scale8(y, factor ? scale * factor[row] : scale, y);
        if (root) add8(root + element, y);
        end.bias8(column, bias);
        add8(bias, y);
        end.activate8(element, y);
        end.dropout.apply8(element, y);
        if (end.out) store8(end.out + element, y);
        largest = Largest::join(largest, end.codes.write8(element, y));
    }
    end.codes.finish<kThreads>(ticket, largest);
}
LSQ_EXPORT(lsq_aggregate)

// partial: the block's sums for the bias, and its part of the gradient of x's clip.
LSQ_KERNEL __launch_bounds__(kThreads, kSumming)
    lsq_aggregate_gradient(const AggregateGradient op, Out<float> partial) {
    wait_for_launches();
    const Float* gradient = op.gradient;
    const float *own = op.own, *factor = op.factor, *row_factor = op.row_factor;
    const bool wanted = static_cast<bool>(op.edges.indptr);  // more than the bias
    const StraightThrough mask{op.x};
    GradientSink sink{op.dx, op.rounded};
    float clip = 0.0f;
    for (int64_t first = kRows * static_cast<int64_t>(blockIdx.x); first < op.rows;
         first += kRows * gridDim.x) {
        const int64_t row = first + row_in_block();
        const bool inside = row < op.rows;
        Values g = {};
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
            if (!inside) continue;
            if (wanted) sum_neighbours8(gradient, op.edges, row, column_of(v), factor, g[v]);
            if (!has(v)) continue;
            const int64_t element = row * COLUMNS + column_of(v);
            float here[kVector];
            load8(gradient + element, here);
            sink.bias_sums.add(v, here);
            if (!wanted) continue;
            if (own) {
                const float times = factor_of(factor, row);
#pragma unroll
                for (int i = 0; i < kVector; ++i) g[v][i] += own[0] * (here[i] * times);
            }
            clip += mask.apply8(element, g[v]);
            if (row_factor) scale8(g[v], row_factor[row], g[v]);
        }
        if (wanted) sink.write(row, inside, g);
    }
    write_partial(sink.bias_sums, clip, partial);
}
LSQ_EXPORT(lsq_aggregate_gradient)
