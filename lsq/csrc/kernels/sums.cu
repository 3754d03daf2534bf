// Adds up what the blocks of another kernel have summed: partial rows of W sums, in order, one result a column.
//
// A row holds up to three sums of N columns side by side and, where `clip` is wanted, one number more, whose sum
// is taken in double precision, as on the CPU.
#include "device.cuh"

namespace {

constexpr int kColumns = 32, kSlices = 8;  // of a block: threads of a column take the rows in `kSlices` runs
constexpr int kLeastBlocks = 4;  // of a multiprocessor, at once: left to itself, NVRTC 13.0 aims at 5 and spills

__device__ __forceinline__ float run_sum(
    const float* partial, int64_t width, int64_t column, int64_t begin, int64_t end) {
    float sum = 0.0f;
#pragma unroll 8
    for (int64_t row = begin; row < end; ++row) sum += partial[row * width + column];
    return sum;
}

}  // namespace

// partial float32 [rows, width]; width = sums * n (+ 1 for the clip, after the columns); null results are skipped.
LSQ_KERNEL __launch_bounds__(kColumns * kSlices, kLeastBlocks) lsq_finish_sums(
    In<float> partial, Out<float> first, Out<float> second, Out<float> third, Out<float> clip, int64_t rows, int64_t n,
    int64_t sums, int64_t width, float factor) {
    __shared__ float part[kSlices][kColumns];
    const int slice = threadIdx.x / kColumns, here = threadIdx.x % kColumns;
    const int64_t column = static_cast<int64_t>(blockIdx.x) * kColumns + here, run = (rows + kSlices - 1) / kSlices;
    if (column < sums * n) {
        part[slice][here] = run_sum(partial, width, column, min(slice * run, rows), min((slice + 1) * run, rows));
    }
    __syncthreads();
    if (slice == 0 && column < sums * n) {
        float total = part[0][here];
#pragma unroll
        for (int i = 1; i < kSlices; ++i) total += part[i][here];
        float* out = column < n ? first : column < 2 * n ? second : third;
        if (out) out[column % n] = total;
    }
    if (clip && blockIdx.x == 0) {
        // Many partial rows, one number of each: every thread takes some, so that their loads overlap.
        __shared__ double totals[kColumns * kSlices];
        double total = 0.0;
#pragma unroll 8
        for (int64_t row = threadIdx.x; row < rows; row += kColumns * kSlices) total += partial[row * width + sums * n];
        totals[threadIdx.x] = total;
        for (int distance = kColumns * kSlices / 2; distance; distance /= 2) {
            __syncthreads();
            if (threadIdx.x < distance) totals[threadIdx.x] += totals[threadIdx.x + distance];
        }
        if (threadIdx.x == 0) clip[0] = static_cast<float>(totals[0] * factor);
    }
}
LSQ_EXPORT(lsq_finish_sums)
