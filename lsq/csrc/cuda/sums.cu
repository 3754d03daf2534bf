// Adds up the partial rows of other kernels' blocks, W sums each, in order, one result per column.
//
// A row holds up to three sums of N columns side by side and, with a clip, one or several numbers
// more, whose sum is taken in double precision, as on the CPU. lsq/ops/sums.py is the reference.
#include "reduce.cuh"

namespace {

// A block's columns; its threads of a column take the rows in `kSlices` runs.
constexpr int kColumns = 32, kSlices = 8;
// Blocks of a multiprocessor: NVRTC 13.0 itself aims at 5 and spills.
constexpr int kLeastBlocks = 4;

LSQ_INLINE float run_sum(const float* partial, int64_t width, int64_t column, int64_t begin,
                         int64_t end) {
    float sum = 0.0f;
#pragma unroll 8
    for (int64_t row = begin; row < end; ++row) sum += partial[row * width + column];
    return sum;
}

// Finishes columns [kColumns * blockIdx.x, ...), and the clip in the first block.
LSQ_INLINE void finish(const PartialSums& one) {
    const float* partial = one.parts;
    const int64_t rows = one.blocks, width = one.width, all = one.sums * one.columns;
    __shared__ float part[kSlices][kColumns];
    const int slice = threadIdx.x / kColumns, here = threadIdx.x % kColumns;
    const int64_t column = static_cast<int64_t>(blockIdx.x) * kColumns + here,
                  run = (rows + kSlices - 1) / kSlices;
    if (column < all) {
        part[slice][here] =
            run_sum(partial, width, column, min(slice * run, rows), min((slice + 1) * run, rows));
    }
    __syncthreads();
    if (slice == 0 && column < all) {
        float total = part[0][here];
#pragma unroll
        for (int i = 1; i < kSlices; ++i) total += part[i][here];
        float* out = column < one.columns       ? one.first
                     : column < 2 * one.columns ? one.second
                                                : one.third;
        if (out) out[column % one.columns] = total;
    }
    if (one.clip && blockIdx.x == 0) {
        // Every thread takes some of the many rows, so that their loads overlap.
        double total = 0.0;
#pragma unroll 8
        for (int64_t row = threadIdx.x; row < rows; row += kColumns * kSlices) {
            const float* numbers = partial + row * width + all;
            total += numbers[0];
#pragma unroll 4
            for (int64_t i = 1; i < one.clip_parts; ++i) total += numbers[i];
        }
        total = block_total<kColumns * kSlices>(total);
        if (threadIdx.x == 0) one.clip[0] = static_cast<float>(total * one.factor);
    }
}

}  // namespace

// Sums of many operations, by blockIdx.y.
LSQ_KERNEL __launch_bounds__(kColumns* kSlices, kLeastBlocks)
    lsq_finish_sums(const __grid_constant__ FinishSums op) {
    wait_for_launches();
    finish(op.sums[blockIdx.y]);
}
LSQ_EXPORT(lsq_finish_sums)

// Sums of one operation.
LSQ_KERNEL __launch_bounds__(kColumns* kSlices, kLeastBlocks)
    lsq_finish_own_sums(In<float> parts, Out<float> first, Out<float> second, Out<float> third,
                        Out<float> clip, int64_t sums, int64_t columns, int64_t blocks,
                        int64_t width, int64_t clip_parts, float factor) {
    wait_for_launches();
    finish({parts, first, second, third, clip, sums, columns, factor, clip_parts, blocks, width});
}
LSQ_EXPORT(lsq_finish_own_sums)
