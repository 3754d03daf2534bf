// Rounds a weight to codes under one clip for each row (output channel), or one for all. N rows, K
// columns. A warp takes a row, so that its scale knows of a NaN; under a single clip the last block
// poisons all scales. lsq/ops/rounding.py is the reference.
#include "reduce.cuh"

namespace {

constexpr int kThreads = 256, kAtOnce = 2;  // vectors of a thread that are on their way together

}  // namespace

LSQ_KERNEL __launch_bounds__(kThreads, 4)
    lsq_round_weight(const RoundWeight op, Out<uint32_t> ticket) {
    wait_for_launches();
    constexpr int kStep = kVector * kWarp;
    const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
    const float *values = op.weight.values, *clip = op.weight.clip;
    float* new_clip = op.new_clip;
    const float q = op.weight.largest;
    int8_t* codes = op.weight.codes;
    float* scale = op.weight.scale;
    const int64_t columns = op.columns;
    bool poisoned_all = false;
    for (int64_t row = blockIdx.x * (kThreads / kWarp) + warp; row < op.rows;
         row += gridDim.x * (kThreads / kWarp)) {
        if (row >= op.valid) {
            const int8_t zeros[kVector] = {};
            for (int64_t column = kVector * lane; column < columns; column += kStep) {
                store8(codes + (row * columns + column), zeros);
            }
            if (lane == 0) scale[row] = 1.0f;
            continue;
        }
        float limit = clip[op.clips > 1 ? row : 0];
        if (new_clip) {
            Magnitude largest = 0;
            for (int64_t column = kVector * lane; column < columns; column += kStep) {
                float x[kVector];
                load8(values + (row * columns + column), x);
                largest = largest8(x, largest);
            }
            limit = clip_of(warp_reduce<Largest>(largest), limit);
            if (lane == 0) new_clip[row] = limit;
        }
        const float step = limit / q;
        bool missing = false;
        for (int64_t column = kVector * lane; column < columns; column += kAtOnce * kStep) {
            float x[kAtOnce][kVector];
#pragma unroll
            for (int v = 0; v < kAtOnce; ++v) {
                if (column + v * kStep < columns)
                    load8(values + (row * columns + column + v * kStep), x[v]);
            }
#pragma unroll
            for (int v = 0; v < kAtOnce; ++v) {
                if (column + v * kStep >= columns) continue;
                int8_t rounded[kVector];
#pragma unroll
                for (int i = 0; i < kVector; ++i) {
                    const float ratio = x[v][i] / step;
                    missing |= ratio != ratio;
                    rounded[i] = code_of(ratio, q);
                }
                store8(codes + (row * columns + column + v * kStep), rounded);
            }
        }
        missing = __any_sync(kAllLanes, missing);
        poisoned_all |= missing;
        if (lane == 0) scale[row] = poisoned(step, missing);
    }
    if (op.clips > 1) return;
    const bool last = last_block<kThreads>(ticket, poisoned_all);
    if (!last || !poisoned_all) return;
    for (int64_t row = threadIdx.x; row < op.valid; row += kThreads) scale[row] = not_a_number();
}
LSQ_EXPORT(lsq_round_weight)
