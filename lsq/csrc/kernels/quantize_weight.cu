// Rounding of a weight to codes under one clip for each row (output channel), or one for all. N rows, K columns.
//
// A warp takes a row, so that a NaN in it is known where its scale is written; under a single clip a NaN anywhere
// poisons all scales, which the last block sees to. lsq/ops/quantize.py (weight_reference) is the reference.
#include "reduce.cuh"
#include "rounding.cuh"

namespace {

constexpr int kThreads = 256, kAtOnce = 2;  // vectors of a thread that are on their way together

}  // namespace

// weight float32 [valid, K], clip [valid] or [1] -> codes [rows, K], scale [rows]; padding has codes 0 and scale 1.
LSQ_KERNEL __launch_bounds__(kThreads) lsq_quantize_weight(
    In<float> weight, In<float> clip, Out<int8_t> codes, Out<float> scale, Out<uint32_t> ticket, int64_t clips,
    int64_t valid, int64_t rows, int64_t columns, float largest) {
    constexpr int kStep = kVector * kWarp;
    const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
    const Rounding rounding{codes, nullptr, nullptr};
    const float *weights = weight, *limits = clip;
    float* scales = scale;
    bool poisoned_all = false;
    for (int64_t row = blockIdx.x * (kThreads / kWarp) + warp; row < rows; row += gridDim.x * (kThreads / kWarp)) {
        if (row >= valid) {
            const int8_t zeros[kVector] = {};
            for (int64_t column = kVector * lane; column < columns; column += kStep) {
                store8(rounding.codes + (row * columns + column), zeros);
            }
            if (lane == 0) scales[row] = 1.0f;
            continue;
        }
        const float step = limits[clips > 1 ? row : 0] / largest;
        bool missing = false;
        for (int64_t column = kVector * lane; column < columns; column += kAtOnce * kStep) {
            float x[kAtOnce][kVector];
#pragma unroll
            for (int v = 0; v < kAtOnce; ++v) {
                if (column + v * kStep < columns) load8(weights + (row * columns + column + v * kStep), x[v]);
            }
#pragma unroll
            for (int v = 0; v < kAtOnce; ++v) {
                if (column + v * kStep >= columns) continue;
#pragma unroll
                for (int i = 0; i < kVector; ++i) x[v][i] /= step;
                missing |= rounding.write8(row * columns + column + v * kStep, x[v], 0, largest);
            }
        }
        missing = __any_sync(kAllLanes, missing);
        poisoned_all |= missing;
        if (lane == 0) scales[row] = poisoned(step, missing);
    }
    if (clips > 1) return;
    const bool last = last_block<kThreads>(ticket, poisoned_all);
    if (!last || !poisoned_all) return;
    for (int64_t row = threadIdx.x; row < valid; row += kThreads) scales[row] = not_a_number();
}
LSQ_EXPORT(lsq_quantize_weight)
