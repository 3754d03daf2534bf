// Product of codes with a 2:4 sparse weight and its epilogue in one kernel: M rows, P outputs, K
// values, both multiples of 16.
//
// For the few rows of a step of decoding, which wait for the weight: each word of it is read once,
// in the order of registers (lsq/ops/sparse_weight.py). A block makes 16 outputs of 32 rows; its
// warps share the steps of 64 values along K.
#include "project_epilogue.cuh"
#include "tensor_core.cuh"

namespace {

constexpr int kSparseThreads = 128, kSparseWarps = kSparseThreads / kWarp;
constexpr int kOutputs = 16, kRows = 32, kRowTiles = kRows / 8, kStep = 64;
// Stride of a row of sums in shared memory; quads stay aligned.
constexpr int kStride = kOutputs + 4;

}  // namespace

LSQ_KERNEL __launch_bounds__(kSparseThreads)
    lsq_sparse_project(const SparseProject op, int64_t inner, Out<uint32_t> ticket) {
    wait_for_launches();
    alignas(16) __shared__ int32_t parts[kSparseWarps * kRows * kStride];
    const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, group = lane / 4,
              part = lane % 4;
    const int64_t first = static_cast<int64_t>(blockIdx.y) * kRows, left = op.rows - first;
    const int64_t steps = (inner + kStep - 1) / kStep;
    int32_t sums[kRowTiles][4] = {};
#pragma unroll 1
    for (int64_t step = warp; step < steps; step += kSparseWarps) {
        const int64_t index = (static_cast<int64_t>(blockIdx.x) * steps + step) * kWarp + lane;
        const uint4 of_weight = load_words<uint4>(op.weight.values + index * sizeof(uint4));
        const uint32_t kept = load_words<uint32_t>(op.weight.kept + index * sizeof(uint32_t));
        const uint32_t a[4] = {of_weight.x, of_weight.y, of_weight.z, of_weight.w};
        const int64_t column = step * kStep + part * sizeof(uint4);
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i) {
            if (8 * i >= left) break;
            uint4 of_row = {};
            if (8 * i + group < left && column < inner) {
                of_row =
                    load_words<uint4>(op.x.coded.codes + (first + 8 * i + group) * inner + column);
            }
            const uint32_t b[4] = {of_row.x, of_row.y, of_row.z, of_row.w};
            multiply_sparse(sums[i], a, b, kept);
        }
    }
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
        for (int number = 0; number < 4; ++number) {
            const int row = 8 * i + 2 * part + number % 2, output = group + number / 2 * 8;
            parts[(warp * kRows + row) * kStride + output] = sums[i][number];
        }
    }
    __syncthreads();
    const ProjectEnd end(op);
    const int row = threadIdx.x / 2;
    Magnitude largest = 0;
    if (row < kRows && row < left) {
        const int64_t column =
            static_cast<int64_t>(blockIdx.x) * kOutputs + threadIdx.x % 2 * kVector;
        int32_t sum[kVector] = {};
#pragma unroll
        for (int other = 0; other < kSparseWarps; ++other) {
            const int32_t* from =
                parts + (other * kRows + row) * kStride + threadIdx.x % 2 * kVector;
#pragma unroll
            for (int i = 0; i < kVector; ++i) sum[i] += from[i];
        }
        float y[kVector], added[kVector], factor[kVector];
        end.bias8(column, added);
        factor8(op, column, factor);
        scale_sums8(sum, factor, row_scale(op.x.coded, first + row), y);
        largest = end.write8((first + row) * op.columns + column, added, y);
    }
    end.codes.finish<kSparseThreads>(ticket, largest);
}
LSQ_EXPORT(lsq_sparse_project)
