// The kept words' part of the gradient of x; lsq/ops/vocabulary_loss.py has the formula. The
// weight's part is in embedding.cu.
#include "rows.cuh"

// A target outside the vocabulary makes its row NaN.
LSQ_KERNEL __launch_bounds__(kThreads) lsq_kept_input_gradient(const KeptInputGradient op) {
    wait_for_launches();
    const Prediction& given = op.prediction;
    const int64_t* targets = given.target;
    const int8_t* codes = given.weight.codes;
    const float *scales = given.weight.scale, *gradients = op.kept.gradient;
    const float upstream = op.dloss[0];
    Float* dx = op.dx;
    const int64_t begin = kRows * static_cast<int64_t>(blockIdx.x) + row_in_block();
    for (int64_t row = begin; row < op.rows; row += kRows * gridDim.x) {
        const int64_t word = targets[row], other = op.kept.likeliest[row];
        const bool known = word >= 0 && word < given.vocabulary, counted = word != given.padding;
        const float own = known ? gradients[row] * upstream * scales[word] : not_a_number();
        const float rest = gradients[op.rows + row] * upstream * scales[other];
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
            if (!has(v)) continue;
            float x[kVector] = {};
            if (counted) {
                int32_t code[kVector] = {}, more[kVector];
                if (known) load8(codes + word * COLUMNS + column_of(v), code);
                load8(codes + other * COLUMNS + column_of(v), more);
#pragma unroll
                for (int i = 0; i < kVector; ++i) {
                    x[i] = static_cast<float>(code[i]) * own + static_cast<float>(more[i]) * rest;
                }
            }
            store8(dx + row * COLUMNS + column_of(v), x);
        }
    }
}
LSQ_EXPORT(lsq_kept_input_gradient)
