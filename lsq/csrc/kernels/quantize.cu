// Rounding of activations to codes under one clip. M rows, N = COLUMNS columns; lsq/ops/quantize.py is the reference.
#include "rounding.cuh"
#include "rows.cuh"

// x [M, N], clip [1] -> codes [M, N], scale [1], clipped bits, error [M, N] or null.
LSQ_KERNEL __launch_bounds__(kThreads) lsq_quantize(
    In<Float> x, In<float> clip, Out<int8_t> codes, Out<float> scale, Out<uint8_t> clipped, Out<float> error,
    Out<uint32_t> ticket, int64_t rows, float largest) {
    const float limit = clip[0];
    const Rounding rounding{codes, clipped, error};
    bool missing = false;
    const int64_t begin = static_cast<int64_t>(kRows) * blockIdx.x + row_in_block();
    for (int64_t row = begin; row < rows; row += kRows * gridDim.x) {
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
            if (!has(v)) continue;
            const int64_t element = row * COLUMNS + column_of(v);
            float values[kVector];
            load8(x + element, values);
            missing |= rounding.round8(element, values, limit, largest);
        }
    }
    finish_scale<kThreads>(ticket, missing, limit, largest, scale);
}
LSQ_EXPORT(lsq_quantize)
