// Rows of words plus rows of positions, time-major, and the sums of their gradient per word.
//
// B sentences, T time, M = B * T below 2^31, V words or places, N = COLUMNS. The backward pass sorts the occurrences by
// word, then by sentence and time, by counting for each how many come before it: no atomics, and an order of additions
// that never changes. Windows of WINDOW sorted occurrences are summed side by side; a word that goes on in the next
// window leaves its sums in `partial`, which one more kernel adds in order, so that frequent words do not take long.
#include "random.cuh"
#include "rows.cuh"

// -DWEIGHT, -DTABLE: 0 float32, 1 Float.
#ifndef WEIGHT
#define WEIGHT 0
#endif
#ifndef TABLE
#define TABLE 0
#endif
#ifndef WINDOW
#define WINDOW 16
#endif

namespace {

template <int is_float>
struct Stored {
    using type = float;
};
template <>
struct Stored<1> {
    using type = Float;
};

// Reads 8 values of a row of `rows`; NaN where there is no such row.
template <class T>
__device__ __forceinline__ void gather8(const T* from, int64_t row, int64_t rows, int column, float (&x)[kVector]) {
    if (row >= 0 && row < rows) {
        load8(from + row * COLUMNS + column, x);
    } else {
#pragma unroll
        for (int i = 0; i < kVector; ++i) x[i] = not_a_number();
    }
}

constexpr uint32_t kNone = 0x7FFFFFFFu;    // key of an occurrence without gradient; larger than all others
constexpr uint32_t kBeyond = 0xFFFFFFFFu;  // of none
constexpr int kWindow = WINDOW, kFlight = 4;  // occurrences; how many gradients are read before the first is used

__device__ __forceinline__ uint32_t key_of(
    const int64_t* tokens, const int64_t* indices, int64_t m, int64_t padding, int64_t rows) {
    const int64_t index = indices[m];
    return tokens[m] != padding && index >= 0 && index < rows ? static_cast<uint32_t>(index) : kNone;
}

}  // namespace

// tokens, places int64 [B, T], weight [V, N], table [P, N] -> x [T * B, N].
LSQ_KERNEL __launch_bounds__(kThreads) lsq_embedding(
    In<int64_t> tokens, In<int64_t> places, In<Stored<WEIGHT>::type> weight, In<Stored<TABLE>::type> table,
    In<int64_t> key, int64_t stream, int64_t threshold, float keep, float scale, Out<Float> x, int64_t batch,
    int64_t time, int64_t words, int64_t positions) {
    const Dropout dropout{key, stream, threshold, keep};
    const Stored<WEIGHT>::type* of_words = weight;
    const Stored<TABLE>::type* of_places = table;
    Float* out = x;
    const uint32_t count = batch * time, sentences = batch;  // divisions of 32 bits are several times as fast
    for (uint32_t row = kRows * blockIdx.x + row_in_block(); row < count; row += kRows * gridDim.x) {
        const int64_t m = row % sentences * time + row / sentences, token = tokens[m], place = places[m];
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
            if (!has(v)) continue;
            float word[kVector], position[kVector];
            gather8(of_words, token, words, column_of(v), word);
            gather8(of_places, place, positions, column_of(v), position);
#pragma unroll
            for (int i = 0; i < kVector; ++i) word[i] = word[i] * scale + position[i];
            const int64_t element = static_cast<int64_t>(row) * COLUMNS + column_of(v);
            dropout.apply8(element, word);
            store8(out + element, word);
        }
    }
}
LSQ_EXPORT(lsq_embedding)

// tokens, indices int64 [M] -> before int32 [gridDim.y, M]: how many of some occurrences each has before it in order.
LSQ_KERNEL __launch_bounds__(kThreads) lsq_rank_occurrences(
    In<int64_t> tokens, In<int64_t> indices, Out<uint32_t> before, int64_t count, int64_t padding, int64_t rows) {
    __shared__ uint4 tile[kThreads / 4];
    uint32_t* keys = reinterpret_cast<uint32_t*>(tile);
    const int64_t *token = tokens, *index = indices;
    const int64_t m = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
    const uint32_t key = m < count ? key_of(token, index, m, padding, rows) : kNone;
    uint32_t found = 0;
    for (int64_t other = blockIdx.y; other * kThreads < count; other += gridDim.y) {
        const int64_t here = other * kThreads + threadIdx.x;
        __syncthreads();
        keys[threadIdx.x] = here < count ? key_of(token, index, here, padding, rows) : kBeyond;
        __syncthreads();
        const uint32_t limit = key + (other < blockIdx.x);  // equal keys count where they come first
#pragma unroll 8
        for (int i = 0; i < kThreads / 4; ++i) {
            const uint4 four = tile[i];
            found += (four.x < limit) + (four.y < limit) + (four.z < limit) + (four.w < limit);
        }
        if (other == blockIdx.x) {
            for (int i = 0; i < static_cast<int>(threadIdx.x); ++i) found += keys[i] == key;
        }
    }
    if (m < count) before[blockIdx.y * count + m] = found;
}
LSQ_EXPORT(lsq_rank_occurrences)

// before [splits, M] -> sorted int32 [2, M]: the keys in order, and the rows of the gradient that they belong to.
LSQ_KERNEL __launch_bounds__(kThreads) lsq_sort_occurrences(
    In<int64_t> tokens, In<int64_t> indices, In<uint32_t> before, Out<uint32_t> sorted, int64_t splits, int64_t batch,
    int64_t time, int64_t padding, int64_t rows) {
    const int64_t count = batch * time, m = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
    if (m >= count) return;
    const uint32_t* counted = before;
    uint32_t place = 0;
#pragma unroll 8
    for (int64_t split = 0; split < splits; ++split) place += counted[split * count + m];
    const uint32_t sentence = static_cast<uint32_t>(m) / static_cast<uint32_t>(time);
    sorted[place] = key_of(tokens, indices, m, padding, rows);
    sorted[count + place] = static_cast<uint32_t>((m - sentence * time) * batch + sentence);
}
LSQ_EXPORT(lsq_sort_occurrences)

// gradient [M, N], sorted [2, M] -> rows of out [V, N] whose occurrences all stand in one window; other sums go to
// partial [2 * windows, N]: row 2 * w for a word that an earlier window began, row 2 * w + 1 for one that w begins.
LSQ_KERNEL __launch_bounds__(kThreads) lsq_sum_occurrences(
    In<Float> gradient, In<uint32_t> sorted, In<int64_t> key, int64_t stream, int64_t threshold, float keep,
    float scale, Out<float> out, Out<float> partial, int64_t count) {
    const Dropout dropout{key, stream, threshold, keep};
    const int64_t window = kRows * static_cast<int64_t>(blockIdx.x) + row_in_block(), begin = window * kWindow;
    const int column = column_of(blockIdx.y);
    if (begin >= count || column >= COLUMNS) return;
    const uint32_t* keys = sorted;
    const uint32_t* origins = keys + count;
    const Float* from = gradient;
    float *whole = out, *cut = partial;
    const auto key_at = [&](int64_t s) { return s >= 0 && s < count ? keys[s] : kNone; };
    float sum[kVector] = {};
    bool begun = key_at(begin - 1) == key_at(begin) && begin > 0;  // by the window before
#pragma unroll 1
    for (int64_t first = begin; first < begin + kWindow; first += kFlight) {
        float g[kFlight][kVector];
        uint32_t word[kFlight + 1];
        int64_t element[kFlight];
#pragma unroll
        for (int i = 0; i <= kFlight; ++i) word[i] = key_at(first + i);
        if (word[0] == kNone) break;
#pragma unroll
        for (int i = 0; i < kFlight; ++i) {
            if (word[i] == kNone) continue;
            element[i] = static_cast<int64_t>(origins[first + i]) * COLUMNS + column;
            load8(from + element[i], g[i]);
        }
#pragma unroll
        for (int i = 0; i < kFlight; ++i) {
            if (word[i] == kNone) continue;
            dropout.apply8(element[i], g[i]);
#pragma unroll
            for (int j = 0; j < kVector; ++j) sum[j] += g[i][j] * scale;
            const bool ends = word[i + 1] != word[i], last = first + i + 1 == begin + kWindow;
            if (!ends && !last) continue;
            const int64_t apart = 2 * window + !begun;
            float* to = ends && !begun ? whole + static_cast<int64_t>(word[i]) * COLUMNS : cut + apart * COLUMNS;
            store8(to + column, sum);
            begun = false;
#pragma unroll
            for (int j = 0; j < kVector; ++j) sum[j] = 0.0f;
        }
    }
}
LSQ_EXPORT(lsq_sum_occurrences)

// partial [2 * windows, N] -> rows of out [V, N] whose occurrences stand in several windows.
LSQ_KERNEL __launch_bounds__(kThreads) lsq_join_occurrences(
    In<uint32_t> sorted, In<float> partial, Out<float> out, int64_t count) {
    const int64_t window = kRows * static_cast<int64_t>(blockIdx.x) + row_in_block(), begin = window * kWindow;
    const int64_t end = begin + kWindow;  // where the next window begins
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
            if (!there[i]) continue;
#pragma unroll
            for (int j = 0; j < kVector; ++j) sum[j] += part[i][j];
        }
        more = there[kFlight - 1];
    }
    store8(out + static_cast<int64_t>(word) * COLUMNS + column, sum);
}
LSQ_EXPORT(lsq_join_occurrences)
