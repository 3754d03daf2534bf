// Rows of COLUMNS values, each held by LANES threads in vectors of 8, several rows in a block at a time.
//
// COLUMNS and LANES come as -D (lsq/csrc/geometry.py chooses LANES); COLUMNS is a multiple of 8. Thread `lane` of a row
// owns vectors lane, lane + LANES, ... Blocks stride over the rows, so that sums over columns stay in registers until
// the end; each block then writes one partial row, and lsq_finish_sums (sums.cu) adds those in order.
#pragma once

#include "reduce.cuh"

namespace lsq {

constexpr int kThreads = 256;
constexpr int kRows = kThreads / LANES;  // of a block at a time
constexpr int kVectors = (COLUMNS / kVector + LANES - 1) / LANES;

static_assert(COLUMNS % kVector == 0, "rows are whole vectors");
static_assert(kThreads % LANES == 0, "LANES divides the threads of a block");

using Values = float[kVectors][kVector];  // what one thread holds of a row

__device__ __forceinline__ int row_in_block() { return threadIdx.x / LANES; }
__device__ __forceinline__ int column_of(int vector) { return kVector * (threadIdx.x % LANES + vector * LANES); }
// Whether the thread has that vector at all.
__device__ __forceinline__ bool has(int vector) { return (vector + 1) * LANES * kVector <= COLUMNS || column_of(vector) < COLUMNS; }

__device__ __forceinline__ float row_sum(float x) { return group_reduce<Sum, LANES, kThreads>(x); }

// Largest magnitude of a row; NaN is larger than infinity.
__device__ __forceinline__ float row_largest(const Values& x) {
    uint32_t largest = 0;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
        if (!has(v)) continue;
#pragma unroll
        for (int i = 0; i < kVector; ++i) largest = Largest::join(largest, bits_of(x[v][i]) & 0x7FFFFFFFu);
    }
    return float_of(group_reduce<Largest, LANES, kThreads>(largest));
}

// Sums per column of what a thread's rows add, or another operation that starts from 0.
template <class Operation>
struct ColumnReduction {
    Values sum = {};

    __device__ __forceinline__ void add(int vector, const float (&x)[kVector]) {
#pragma unroll
        for (int i = 0; i < kVector; ++i) sum[vector][i] = Operation::join(sum[vector][i], x[i]);
    }

    // Writes the block's results [COLUMNS]: those of its rows in order. All threads of the block must call this.
    __device__ __forceinline__ void write(float* out) const {
        if (kRows == 1) {
#pragma unroll
            for (int v = 0; v < kVectors; ++v) {
                if (has(v)) store8(out + column_of(v), sum[v]);
            }
            return;
        }
        __shared__ float total[COLUMNS];
        for (int row = 0; row < kRows; ++row) {
            __syncthreads();
            if (row_in_block() != row) continue;
#pragma unroll
            for (int v = 0; v < kVectors; ++v) {
                if (!has(v)) continue;
#pragma unroll
                for (int i = 0; i < kVector; ++i) {
                    float& here = total[column_of(v) + i];
                    here = row ? Operation::join(here, sum[v][i]) : sum[v][i];
                }
            }
        }
        __syncthreads();
        for (int column = threadIdx.x; column < COLUMNS; column += kThreads) out[column] = total[column];
        __syncthreads();
    }
};
using ColumnSums = ColumnReduction<Sum>;

// Writes the block's sum of x [1]. All threads of the block must call this.
template <int THREADS = kThreads>
__device__ __forceinline__ void write_block_sum(float x, float* out) {
    const float total = group_reduce<Sum, THREADS, THREADS>(x);
    if (threadIdx.x == 0) out[0] = total;
}

}  // namespace lsq
