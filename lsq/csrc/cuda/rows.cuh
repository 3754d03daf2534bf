// Rows of COLUMNS values, each held by LANES threads in vectors of 8, several rows per block at a
// time.
//
// -DCOLUMNS is a multiple of 8; lsq/native/geometry.py chooses -DLANES. Thread `lane` of a row owns
// vectors lane, lane + LANES, ... Blocks stride over the rows, so that sums over columns stay in
// registers; each block then writes one partial row, and lsq_finish_sums (sums.cu) adds those in
// order.
#pragma once

#include "reduce.cuh"

namespace lsq {

constexpr int kThreads = 256;
constexpr int kRows = kThreads / LANES;  // of a block at a time
constexpr int kPadding = 4;              // numbers beyond its sums that a partial row has
constexpr int kVectors = (COLUMNS / kVector + LANES - 1) / LANES;

static_assert(COLUMNS % kVector == 0, "rows are whole vectors");
static_assert(kThreads % LANES == 0, "LANES divides the threads of a block");

using Values = float[kVectors][kVector];  // what one thread holds of a row

template <class T>
struct PackedRow {
    Packed<T> part[kVectors];
};

LSQ_INLINE int row_in_block() { return threadIdx.x / LANES; }
LSQ_INLINE int column_of(int vector) { return kVector * (threadIdx.x % LANES + vector * LANES); }
// Whether the thread has that vector at all.
LSQ_INLINE bool has(int vector) {
    return (vector + 1) * LANES * kVector <= COLUMNS || column_of(vector) < COLUMNS;
}

// Blackwell's assembler begins more loads early, and would spill.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
constexpr bool kEager = true;
#else
constexpr bool kEager = false;
#endif
// Least blocks of a multiprocessor: of kernels that keep a row and pointers, or sums over rows.
constexpr int kMedium = kVectors > 2 ? 1 : kEager ? 2 : 3;
constexpr int kSumming = kVectors > 2 || (kEager && sizeof(Float) == 4) ? 1 : 2;

// Calls work(row, inside, operands) for the rows of this block; load(row) makes the operands, a row
// ahead if registers allow. All threads call `work` equally often.
template <class Load, class Work>
LSQ_INLINE void for_rows(int64_t rows, const Load& load, const Work& work) {
    const int64_t step = static_cast<int64_t>(kRows) * gridDim.x;
    int64_t first = static_cast<int64_t>(kRows) * blockIdx.x, row = first + row_in_block();
    using Operands = decltype(load(row));
    // More would not fit into the registers.
    constexpr bool kAhead = kVectors <= 2 && sizeof(Operands) <= 80;
    Operands operands{};
    if (kAhead && row < rows) operands = load(row);
    for (; first < rows; first += step, row += step) {
        if constexpr (kAhead) {
            const Operands now = operands;
            if (row + step < rows) operands = load(row + step);
            work(row, row < rows, now);
        } else {
            if (row < rows) operands = load(row);
            work(row, row < rows, operands);
        }
    }
}

// Loads rows of a matrix [rows, COLUMNS], for for_rows.
template <class T>
LSQ_INLINE auto row_loader(const T* from) {
    return [=](int64_t row) {
        PackedRow<T> packed;
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
            if (has(v)) packed.part[v] = load_packed(from + row * COLUMNS + column_of(v));
        }
        return packed;
    };
}

LSQ_INLINE float row_sum(float x) { return group_reduce<Sum, LANES, kThreads>(x); }

// Largest magnitude of a row; NaN if one is.
LSQ_INLINE float row_largest(const Values& x) {
    float largest = 0.0f;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
        if (!has(v)) continue;
#pragma unroll
        for (int i = 0; i < kVector; ++i) largest = LargestMagnitude::join(largest, x[v][i]);
    }
    return group_reduce<LargestMagnitude, LANES, kThreads>(largest);
}

// Sums of two numbers over a row.
LSQ_INLINE void row_sums(float& a, float& b) {
    a = warp_reduce<Sum>(a);
    b = warp_reduce<Sum>(b);
    if (LANES == kWarp) return;
    constexpr int warps = LANES / kWarp;
    __shared__ float part[kThreads / kWarp][2];
    const int warp = threadIdx.x / kWarp, begin = warp / warps * warps;
    __syncthreads();  // the values of a call before have been read
    if (threadIdx.x % kWarp == 0) part[warp][0] = a, part[warp][1] = b;
    __syncthreads();
    a = part[begin][0], b = part[begin][1];
#pragma unroll
    for (int i = 1; i < warps; ++i) a += part[begin + i][0], b += part[begin + i][1];
}

// Sums of columns over a thread's rows.
struct ColumnSums {
    Values sum = {};

    LSQ_INLINE void add(int vector, const float (&x)[kVector]) { add8(x, sum[vector]); }

    // Writes the block's sums [COLUMNS]: those of its rows in order. All threads of the block must
    // call this.
    LSQ_INLINE void write(float* out) const {
        if (kRows == 1) {
#pragma unroll
            for (int v = 0; v < kVectors; ++v) {
                if (has(v)) store8(out + column_of(v), sum[v]);
            }
            return;
        }
        __shared__ float4 total[2][COLUMNS / kVector];  // halves apart: lanes meet in no bank
        for (int row = 0; row < kRows; ++row) {
            __syncthreads();
            if (row_in_block() != row) continue;
#pragma unroll
            for (int v = 0; v < kVectors; ++v) {
                if (!has(v)) continue;
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    float4* here = total[half] + column_of(v) / kVector;
                    const float* add = sum[v] + 4 * half;
                    const float4 old =
                        row ? load_words<float4>(here) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
                    store_words(here, make_float4(old.x + add[0], old.y + add[1], old.z + add[2],
                                                  old.w + add[3]));
                }
            }
        }
        __syncthreads();
#pragma unroll
        for (int first = 0; first < COLUMNS / 4; first += kThreads) {
            const int four = first + threadIdx.x;
            if (four < COLUMNS / 4)
                store_words(out + 4 * four, load_words<float4>(total[four % 2] + four / 2));
        }
    }
};

// ColumnSums in shared memory, for kernels without registers left; every thread has its own words.
struct SharedColumnSums {
    static constexpr int kWords = 2 * kVectors * kThreads;
    float4* words;  // [kWords]

    // All threads must call this before the first `add`.
    LSQ_INLINE void clear() const {
#pragma unroll
        for (int i = 0; i < 2 * kVectors; ++i) {
            store_words(words + i * kThreads + threadIdx.x, make_float4(0.0f, 0.0f, 0.0f, 0.0f));
        }
    }

    LSQ_INLINE void add(int vector, const float (&x)[kVector]) const {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float4* sum = words + (2 * vector + half) * kThreads + threadIdx.x;
            const float4 old = load_words<float4>(sum);
            store_words(sum, make_float4(old.x + x[4 * half], old.y + x[4 * half + 1],
                                         old.z + x[4 * half + 2], old.w + x[4 * half + 3]));
        }
    }

    // Writes the block's sums [COLUMNS]: those of its rows in order. All threads of the block must
    // call this.
    LSQ_INLINE void write(float* out) const {
        __syncthreads();
        for (int four = threadIdx.x; four < COLUMNS / 4; four += kThreads) {
            const int part = four / 2 / LANES * 2 + four % 2,
                      first = part * kThreads + four / 2 % LANES;
            float4 total = load_words<float4>(words + first);
            for (int row = 1; row < kRows; ++row) {
                const float4 sum = load_words<float4>(words + first + row * LANES);
                total.x += sum.x, total.y += sum.y, total.z += sum.z, total.w += sum.w;
            }
            store_words(out + 4 * four, total);
        }
    }
};

// Writes the block's sum of x [1]. All threads of the block must call this.
template <int THREADS = kThreads>
LSQ_INLINE void write_block_sum(float x, float* out) {
    const float total = group_reduce<Sum, THREADS, THREADS>(x);
    if (threadIdx.x == 0) out[0] = total;
}

// Writes the block's partial row: sums of columns, and behind them the sum of `clip`.
LSQ_INLINE void write_partial(const ColumnSums& sums, float clip, float* partial) {
    float* out = partial + blockIdx.x * (COLUMNS + kPadding);
    sums.write(out);
    write_block_sum(clip, out + COLUMNS);
}

}  // namespace lsq
