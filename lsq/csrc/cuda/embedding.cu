// Embeds words and positions, and sums their gradient per word.
//
// -DKEPT=1: instead, the kept words' part of the gradient of a vocabulary's weight
// (KeptWeightGradient): rows are x times the gradient of a kept word's logit, twice as many as
// those of x, and sums are added to the existing ones.
//
// M tokens, below 2^31, V words or positions, N = COLUMNS. The backward pass sorts occurrences by
// word, then row, by counting the ones before each: no atomics, a fixed order of additions. Windows
// of WINDOW sorted occurrences are summed side by side; a word that crosses windows leaves its sums
// in `partial`, which one more kernel adds in order.
#include "random.cuh"
#include "rows.cuh"

#ifndef WINDOW
#define WINDOW 16
#endif

namespace {

// Reads 8 values of a row; NaN if there is no such row.
LSQ_INLINE void gather8(const float* from, int64_t row, int64_t rows, int column,
                        float (&x)[kVector]) {
    if (row >= 0 && row < rows) {
        load8(from + row * COLUMNS + column, x);
    } else {
#pragma unroll
        for (int i = 0; i < kVector; ++i) x[i] = not_a_number();
    }
}

// Key of an occurrence without gradient; larger than all others.
constexpr uint32_t kNone = 0x7FFFFFFFu;
constexpr uint32_t kBeyond = 0xFFFFFFFFu;  // of none
// Occurrences of a window; gradients that are read ahead.
constexpr int kWindow = WINDOW, kFlight = 4;

#if KEPT

using Scatter = KeptWeightGradient;

// Rows of x by their targets, then by their likeliest other words.
struct Occurrences {
    const Scatter& op;
    const int64_t *targets, *others;
    int64_t of_x, padding, rows;
    float factor;

    LSQ_INLINE Occurrences(const Scatter& op, int64_t)
        : op(op), targets(op.prediction.target), others(op.kept.likeliest),
          of_x(op.prediction.rows), padding(op.prediction.padding), rows(op.prediction.vocabulary),
          factor(op.dloss[0] * op.prediction.x.coded.scale[0]) {}

    LSQ_INLINE int64_t row_of_x(int64_t row) const { return row < of_x ? row : row - of_x; }
    LSQ_INLINE int64_t index(int64_t row) const {
        return row < of_x ? targets[row] : others[row - of_x];
    }
    LSQ_INLINE bool counts(int64_t row) const { return targets[row_of_x(row)] != padding; }

    LSQ_INLINE void read8(int64_t row, int column, float (&g)[kVector]) const {
        const int8_t* codes = op.prediction.x.coded.codes;
        const float own = op.kept.gradient[row] * factor;
        int32_t code[kVector];
        load8(codes + row_of_x(row) * COLUMNS + column, code);
        scale8(code, own, g);
    }

    LSQ_INLINE void add8(int64_t, int, const float (&g)[kVector], float (&sum)[kVector]) const {
        lsq::add8(g, sum);
    }

    // Adds nothing where the weight is clipped.
    LSQ_INLINE void write8(int64_t word, int column, const float (&sum)[kVector]) const {
        const int64_t element = word * COLUMNS + column;
        const float* values = op.weight.values;
        const float clip = op.weight.absmax ? infinity() : op.weight.clip[op.clips == 1 ? 0 : word];
        float value[kVector], total[kVector];
        load8(values + element, value);
        float* dweight = op.dweight;  // holds the others' gradient
        load8(dweight + element, total);
#pragma unroll
        for (int i = 0; i < kVector; ++i) total[i] += fabsf(value[i]) > clip ? 0.0f : sum[i];
        store8(dweight + element, total);
    }
};

#else

using Scatter = EmbedGradient;

// Rows of the gradient by their words, or positions.
struct Occurrences {
    const Scatter& op;
    const int64_t* indices;
    int64_t padding, rows;
    float scale;
    float* out;  // [V, N]
    DropoutMask dropout;

    LSQ_INLINE Occurrences(const Scatter& op, int64_t of_positions)
        : op(op), indices(of_positions ? op.positions : op.tokens), padding(op.padding),
          rows(of_positions ? op.table_rows : op.vocabulary), scale(of_positions ? 1.0f : op.scale),
          out(of_positions ? op.dtable : op.dweight), dropout{op.dropout} {}

    LSQ_INLINE int64_t index(int64_t row) const { return indices[row]; }
    LSQ_INLINE bool counts(int64_t row) const { return op.tokens[row] != padding; }

    LSQ_INLINE void read8(int64_t row, int column, float (&g)[kVector]) const {
        const Float* from = op.gradient;
        load8(from + row * COLUMNS + column, g);
    }

    LSQ_INLINE void add8(int64_t row, int column, float (&g)[kVector],
                         float (&sum)[kVector]) const {
        dropout.apply8(row * COLUMNS + column, g);
#pragma unroll
        for (int i = 0; i < kVector; ++i) sum[i] += g[i] * scale;
    }

    LSQ_INLINE void write8(int64_t word, int column, const float (&sum)[kVector]) const {
        store8(out + word * COLUMNS + column, sum);
    }
};

#endif

// Sort key.
LSQ_INLINE uint32_t key_of(const Occurrences& table, int64_t row) {
    const int64_t index = table.index(row);
    return table.counts(row) && index >= 0 && index < table.rows ? static_cast<uint32_t>(index)
                                                                 : kNone;
}

}  // namespace

#if !KEPT

LSQ_KERNEL __launch_bounds__(kThreads) lsq_embed(const Embed op) {
    wait_for_launches();
    const int64_t *tokens = op.tokens, *positions = op.positions;
    const float *weight = op.weight, *table = op.table;
    Float* x = op.x;
    const DropoutMask dropout{op.dropout};
    const int64_t begin = kRows * static_cast<int64_t>(blockIdx.x) + row_in_block();
    for (int64_t row = begin; row < op.rows; row += kRows * gridDim.x) {
        const int64_t token = tokens[row], index = positions[row];
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
            if (!has(v)) continue;
            const int64_t element = row * COLUMNS + column_of(v);
            float word[kVector] = {}, position[kVector];
            if (token != op.padding) {
                gather8(weight, token, op.vocabulary, column_of(v), word);
                gather8(table, index, op.table_rows, column_of(v), position);
#pragma unroll
                for (int i = 0; i < kVector; ++i) word[i] = word[i] * op.scale + position[i];
                dropout.apply8(element, word);
            }
            store8(x + element, word);
        }
    }
}
LSQ_EXPORT(lsq_embed)

#endif

// before int32 [gridDim.y, M]: for each occurrence, the number of earlier ones in a part of all.
LSQ_KERNEL __launch_bounds__(kThreads)
    lsq_rank_occurrences(const Scatter op, Out<uint32_t> before, int64_t of_positions) {
    wait_for_launches();
    __shared__ uint4 tile[kThreads / 4];
    uint32_t* keys = reinterpret_cast<uint32_t*>(tile);
    const Occurrences table(op, of_positions);
    const int64_t count = op.rows, m = thread_of_grid<kThreads>();
    const uint32_t key = m < count ? key_of(table, m) : kNone;
    uint32_t earlier = 0;
    for (int64_t other = blockIdx.y; other * kThreads < count; other += gridDim.y) {
        const int64_t here = other * kThreads + threadIdx.x;
        __syncthreads();
        keys[threadIdx.x] = here < count ? key_of(table, here) : kBeyond;
        __syncthreads();
        // Equal keys count where they come first.
        const uint32_t limit = key + (other < blockIdx.x);
#pragma unroll 8
        for (int i = 0; i < kThreads / 4; ++i) {
            const uint4 four = load_words<uint4>(tile + i);
            earlier += (four.x < limit) + (four.y < limit) + (four.z < limit) + (four.w < limit);
        }
        if (other == blockIdx.x) {
            for (int i = 0; i < static_cast<int>(threadIdx.x); ++i) earlier += keys[i] == key;
        }
    }
    if (m < count) before[blockIdx.y * count + m] = earlier;
}
LSQ_EXPORT(lsq_rank_occurrences)

// before [splits, M] -> sorted int32 [2, M]: the keys in order, and their rows.
LSQ_KERNEL __launch_bounds__(kThreads)
    lsq_sort_occurrences(const Scatter op, In<uint32_t> before, Out<uint32_t> sorted,
                         int64_t splits, int64_t of_positions) {
    wait_for_launches();
    const int64_t count = op.rows, m = thread_of_grid<kThreads>();
    if (m >= count) return;
    const uint32_t* counted = before;
    uint32_t rank = 0;
#pragma unroll 8
    for (int64_t split = 0; split < splits; ++split) rank += counted[split * count + m];
    sorted[rank] = key_of(Occurrences(op, of_positions), m);
    sorted[count + rank] = static_cast<uint32_t>(m);
}
LSQ_EXPORT(lsq_sort_occurrences)

// sorted [2, M] -> rows of the table's gradient [V, N] of words in one window; other sums go to
// partial [2 * windows, N]: row 2 * w for a word that an earlier window began, row 2 * w + 1 for
// one that w begins.
LSQ_KERNEL __launch_bounds__(kThreads)
    lsq_sum_occurrences(const Scatter op, In<uint32_t> sorted, Out<float> partial,
                        int64_t of_positions) {
    wait_for_launches();
    const Occurrences table(op, of_positions);
    const int64_t count = op.rows,
                  window = kRows * static_cast<int64_t>(blockIdx.x) + row_in_block();
    const int64_t begin = window * kWindow;
    const int column = column_of(blockIdx.y);
    if (begin >= count || column >= COLUMNS) return;
    const uint32_t *keys = sorted, *origins = keys + count;
    float* cut = partial;
    const auto key_at = [&](int64_t s) { return s >= 0 && s < count ? keys[s] : kNone; };
    float sum[kVector] = {};
    bool begun = key_at(begin - 1) == key_at(begin) && begin > 0;  // by the window before
#pragma unroll 1
    for (int64_t first = begin; first < begin + kWindow; first += kFlight) {
        float g[kFlight][kVector];
        uint32_t word[kFlight + 1];
        int64_t origin[kFlight];
#pragma unroll
        for (int i = 0; i <= kFlight; ++i) word[i] = key_at(first + i);
        if (word[0] == kNone) break;
#pragma unroll
        for (int i = 0; i < kFlight; ++i) {
            if (word[i] == kNone) continue;
            origin[i] = origins[first + i];
            table.read8(origin[i], column, g[i]);
        }
#pragma unroll
        for (int i = 0; i < kFlight; ++i) {
            if (word[i] == kNone) continue;
            table.add8(origin[i], column, g[i], sum);
            const bool ends = word[i + 1] != word[i], last = first + i + 1 == begin + kWindow;
            if (!ends && !last) continue;
            if (ends && !begun) {
                table.write8(word[i], column, sum);
            } else {
                store8(cut + (2 * window + !begun) * COLUMNS + column, sum);
            }
            begun = false;
#pragma unroll
            for (int j = 0; j < kVector; ++j) sum[j] = 0.0f;
        }
    }
}
LSQ_EXPORT(lsq_sum_occurrences)

// partial [2 * windows, N] -> rows of the table's gradient of words in several windows.
LSQ_KERNEL __launch_bounds__(kThreads)
    lsq_join_occurrences(const Scatter op, In<uint32_t> sorted, In<float> partial,
                         int64_t of_positions) {
    wait_for_launches();
    const int64_t count = op.rows,
                  window = kRows * static_cast<int64_t>(blockIdx.x) + row_in_block();
    const int64_t begin = window * kWindow, end = begin + kWindow;  // where the next window begins
    const int column = column_of(blockIdx.y);
    if (end >= count || column >= COLUMNS) return;
    const uint32_t* keys = sorted;
    const uint32_t word = keys[end];
    const bool begun = begin > 0 && keys[begin - 1] == word;
    if (word == kNone || keys[end - 1] != word || begun) return;
    const float* cut = partial;
    float sum[kVector];
    load8(cut + (2 * window + 1) * COLUMNS + column, sum);
    bool more = true;
#pragma unroll 1
    for (int64_t first = window + 1; more; first += kFlight) {
        float part[kFlight][kVector];
        bool there[kFlight];
#pragma unroll
        for (int i = 0; i < kFlight; ++i) {
            const int64_t other = first + i;
            there[i] = other * kWindow < count && keys[other * kWindow] == word;
            if (there[i]) load8(cut + 2 * other * COLUMNS + column, part[i]);
        }
#pragma unroll
        for (int i = 0; i < kFlight; ++i) {
            if (there[i]) add8(part[i], sum);
        }
        more = there[kFlight - 1];
    }
    Occurrences(op, of_positions).write8(word, column, sum);
}
LSQ_EXPORT(lsq_join_occurrences)
