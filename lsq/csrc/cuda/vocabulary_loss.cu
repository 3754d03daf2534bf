// Label-smoothed cross-entropy and its gradient on a block of float logits;
// lsq/ops/vocabulary_loss.py is the reference. vocabulary_sums.cu adds up the losses of rows;
// vocabulary_loss_product.cu is for codes.
//
// M rows, V words, P padded words. ROW_THREADS threads take one row of logits float32 [P], rows
// `stride` apart, a multiple of 8; a block of logits begins at row `first`.
#include "vocabulary_loss.cuh"

#ifndef ROW_THREADS
#define ROW_THREADS 256
#endif

namespace {

// Calls use(column) for each vector [column, column + 8) of a row that belongs to the thread.
template <class Use>
LSQ_INLINE void each8(int columns, Use use) {
    for (int column = kVector * threadIdx.x; column < columns; column += kVector * ROW_THREADS)
        use(column);
}

template <class Operation>
LSQ_INLINE float block_reduce(float value) {
    return group_reduce<Operation, ROW_THREADS, ROW_THREADS>(value);
}

}  // namespace

// One row of logits a block. A target outside the vocabulary makes the losses NaN.
LSQ_KERNEL __launch_bounds__(ROW_THREADS, 1024 / ROW_THREADS)
    lsq_vocabulary_loss(const VocabularyLoss op, In<float> logits, int64_t stride, int64_t first,
                        Out<float> losses, Out<float> nlls) {
    wait_for_launches();
    const Prediction& given = op.prediction;
    const int vocabulary = static_cast<int>(given.vocabulary);
    const int64_t m = first + blockIdx.x, word = given.target[m];
    const float* line = logits + blockIdx.x * stride;
    LogitSums row;
    if (word != given.padding || op.normaliser) {
        each8(vocabulary, [&](int column) {
            float x[kVector];
            load8(line + column, x);
            fill_up(vocabulary - column, 0.0f, x);
#pragma unroll
            for (int i = 0; i < kVector; ++i) row.total += x[i];
            fill_up(vocabulary - column, -infinity(), x);
            float highest = row.largest;
#pragma unroll
            for (int i = 0; i < kVector; ++i) highest = Maximum::join(x[i], highest);
            row.raise(highest);
            const float shift = shift_of(highest);
#pragma unroll
            for (int i = 0; i < kVector; ++i) row.sum += bounded_exponential(x[i] - shift);
        });
        const float highest = block_reduce<Maximum>(row.largest);
        row.sum = block_reduce<Sum>(row.sum * bounded_exponential(row.largest - shift_of(highest)));
        row.total = block_reduce<Sum>(row.total);
        row.largest = highest;
    }
    if (threadIdx.x != 0) return;
    write_losses(op, m, row, word >= 0 && word < vocabulary ? line[word] : not_a_number(), losses,
                 nlls);
}
LSQ_EXPORT(lsq_vocabulary_loss)

LSQ_KERNEL __launch_bounds__(ROW_THREADS, 1024 / ROW_THREADS)
    lsq_vocabulary_loss_gradient(const VocabularyLossGradient op, In<float> logits, int64_t stride,
                                 int64_t first) {
    wait_for_launches();
    const Prediction& given = op.prediction;
    const int columns = static_cast<int>(given.columns),
              vocabulary = static_cast<int>(given.vocabulary);
    const int64_t m = first + blockIdx.x, word = given.target[m];
    const float* row = logits + blockIdx.x * stride;
    const float target_weight = given.target_weight, each = given.each,
                factor = gradient_factor(given);
    const float shift = op.normaliser[m], upstream = op.dloss[0];
    const bool counted = word != given.padding, aligned = columns % kVector == 0;
    Float* line = op.dlogits + m * columns;
    each8(columns, [&](int column) {
        float x[kVector] = {};
        if (counted) {
            load8(row + column, x);
#pragma unroll
            for (int i = 0; i < kVector; ++i) {
                x[i] = (bounded_exponential(x[i] - shift) * factor - each) * upstream;
                if (column + i == word) x[i] -= target_weight * upstream;
            }
            fill_up(vocabulary - column, 0.0f, x);
        }
        if (aligned) {
            store8(line + column, x);
        } else {
#pragma unroll
            for (int i = 0; i < kVector; ++i) {
                if (column + i < columns) line[column + i] = narrow<Float>(x[i]);
            }
        }
    });
}
LSQ_EXPORT(lsq_vocabulary_loss_gradient)
