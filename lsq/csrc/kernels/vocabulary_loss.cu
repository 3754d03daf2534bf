// Log-softmax, label-smoothed cross-entropy and their gradient on a block of logits; lsq/ops/vocabulary_loss.py
// is the reference.
//
// M rows, V words, P padded words. ROW_THREADS threads take one row of logits [P], int32 sums (KIND 1) or float32
// (KIND 2), rows `stride` apart, a multiple of 8; a block of logits begins at row `first`. The forward pass keeps
// a running maximum (Milakov and Gimelshein 2018, "Online normalizer calculation for softmax"); the backward pass, whose
// rows have known scales, rounds in one go. Losses of rows are summed in double precision, in a fixed order.
#include "random.cuh"
#include "reduce.cuh"

#ifndef ROW_THREADS
#define ROW_THREADS 256
#endif
#ifndef ROUNDED
#define ROUNDED 0
#endif
#ifndef KIND
#define KIND 2
#endif

namespace {

#if KIND == 1
using Logit = int32_t;
#else
using Logit = float;
#endif

// Calls use(column) for each vector [column, column + 8) of a row that belongs to the thread.
template <class Use>
__device__ __forceinline__ void each8(int columns, Use use) {
    for (int column = kVector * threadIdx.x; column < columns; column += kVector * ROW_THREADS) use(column);
}

template <class Operation, class T>
__device__ __forceinline__ T block_reduce(T value) {
    return group_reduce<Operation, ROW_THREADS, ROW_THREADS>(value);
}

struct Logits {
    const Logit* row;
    const float* weight_scale;  // [P]
    float x_scale;
    int vocabulary;

    __device__ __forceinline__ Logits(const Prediction& given, const Logit* row)
        : row(row), weight_scale(given.weight.scale), x_scale(KIND == 1 ? *given.x.coded.scale : 1.0f),
          vocabulary(static_cast<int>(given.vocabulary)) {}

    __device__ __forceinline__ float read(int64_t column) const {
#if KIND == 1
        return static_cast<float>(row[column]) * (x_scale * weight_scale[column]);
#else
        return row[column];
#endif
    }

    // Logits and, of sums, the weight's scale; beyond the vocabulary minus infinity and 0.
    __device__ __forceinline__ void read8(int column, float (&x)[kVector], float (&scale)[kVector]) const {
#if KIND == 1
        int32_t sums[kVector];
        load8(row + column, sums);
        load8(weight_scale + column, scale);
#pragma unroll
        for (int i = 0; i < kVector; ++i) x[i] = static_cast<float>(sums[i]) * (x_scale * scale[i]);
#else
        load8(row + column, x);
#pragma unroll
        for (int i = 0; i < kVector; ++i) scale[i] = 0.0f;
#endif
        if (column + kVector <= vocabulary) return;
#pragma unroll
        for (int i = 0; i < kVector; ++i) {
            x[i] = column + i < vocabulary ? x[i] : -infinity();
            scale[i] = column + i < vocabulary ? scale[i] : 0.0f;
        }
    }
};

// Of a row: the largest logit, of exp(logit - largest) the sum and, without the target, the largest multiple by the
// weight's scale; the sum of the logits, and the largest scale. Magnitudes are kept as bits.
struct RowSums {
    float largest = -infinity(), sum = 0.0f, total = 0.0f;
    uint32_t scaled = 0, scale = 0;

    __device__ __forceinline__ void add8(const Logits& logits, int column, int64_t word) {
        float x[kVector], scales[kVector];
        logits.read8(column, x, scales);
        float highest = largest;
#pragma unroll
        for (int i = 0; i < kVector; ++i) {
            highest = Maximum::join(x[i], highest);
            scale = Largest::join(scale, magnitude(scales[i]));
        }
        if (column + kVector <= logits.vocabulary) {
#pragma unroll
            for (int i = 0; i < kVector; ++i) total += x[i];
        } else {
#pragma unroll
            for (int i = 0; i < kVector; ++i) total += column + i < logits.vocabulary ? x[i] : 0.0f;
        }
        // Nothing above minus infinity so far: any finite shift gives exp = 0.
        const float shift = highest == -infinity() ? 0.0f : highest;
        if (highest > largest) {
            const float factor = bounded_exponential(largest - highest);
            sum *= factor;
            scaled = magnitude(float_of(scaled) * factor);
            largest = highest;
        }
#pragma unroll
        for (int i = 0; i < kVector; ++i) {
            const float exponential = bounded_exponential(x[i] - shift);
            sum += exponential;
            scaled = Largest::join(scaled, column + i == word ? 0u : magnitude(exponential * scales[i]));
        }
    }

    // Of all threads of the block together.
    __device__ __forceinline__ void join() {
        const float highest = block_reduce<Maximum>(largest), factor = bounded_exponential(largest - highest);
        sum = block_reduce<Sum>(sum * factor);
        total = block_reduce<Sum>(total);
        scaled = block_reduce<Largest>(magnitude(float_of(scaled) * factor));
        scale = block_reduce<Largest>(scale);
        largest = highest;
    }

    static __device__ __forceinline__ uint32_t magnitude(float x) { return bits_of(x) & 0x7FFFFFFFu; }
};

}  // namespace

// One row of logits a block. A target outside the vocabulary makes the losses and the row's bound NaN.
LSQ_KERNEL __launch_bounds__(ROW_THREADS, 1024 / ROW_THREADS) lsq_vocabulary_loss(
    const VocabularyLoss op, In<Logit> sums, int64_t stride, int64_t first, Out<float> losses, Out<float> nlls) {
    const Prediction& given = op.prediction;
    const int64_t columns = given.columns, vocabulary = given.vocabulary, m = first + blockIdx.x, word = given.target[m];
    const float target_weight = given.target_weight, each = given.each;
    const bool counted = word != given.padding;
    const Logits logits(given, sums + blockIdx.x * stride);
    RowSums row;
    if (counted || op.normaliser) {
        each8(columns, [&](int column) { row.add8(logits, column, word); });
        row.join();
    }
    if (threadIdx.x != 0) return;
    const bool known_word = word >= 0 && word < vocabulary;
    const float chosen = known_word ? logits.read(word) : not_a_number();
    const float log_normaliser = row.largest + logf(row.sum);
    const float missed = counted ? log_normaliser - chosen : 0.0f;
    const float smooth = static_cast<float>(vocabulary) * log_normaliser - row.total;
    nlls[m] = missed;
    losses[m] = counted ? target_weight * missed + each * smooth : 0.0f;
    if (op.normaliser) op.normaliser[m] = log_normaliser;
#if KIND == 1
    if (!op.bound) return;
    const float factor = target_weight + each * static_cast<float>(vocabulary), share = factor / row.sum;
    const float own = bounded_exponential(chosen - log_normaliser) * factor - each - target_weight;
    const uint32_t others = Largest::join(
        RowSums::magnitude(float_of(row.scaled) * share), RowSums::magnitude(each * float_of(row.scale)));
    const uint32_t own_scaled = RowSums::magnitude(own * (known_word ? logits.weight_scale[word] : 0.0f));
    op.bound[m] = counted ? float_of(Largest::join(others, own_scaled)) : 0.0f;
#endif
}
LSQ_EXPORT(lsq_vocabulary_loss)

LSQ_KERNEL __launch_bounds__(ROW_THREADS, 1024 / ROW_THREADS)
    lsq_vocabulary_loss_gradient(const VocabularyLossGradient op, In<Logit> sums, int64_t stride, int64_t first) {
    const Prediction& given = op.prediction;
    const int64_t columns = given.columns, m = first + blockIdx.x, word = given.target[m];
    const Logits logits(given, sums + blockIdx.x * stride);
    const float target_weight = given.target_weight, each = given.each;
    const float factor = target_weight + each * static_cast<float>(given.vocabulary), shift = op.normaliser[m];
    const bool counted = word != given.padding;
#if ROUNDED
    const float q = op.rounded.largest, upstream = 1.0f;
    const GradientScale s = gradient_scale(op.bound[m], q);
    const int64_t drawn_from = op.rounded.key[0];
    if (threadIdx.x == 0) op.rounded.scale[m] = s.scale * op.dloss[0];
#else
    const float upstream = op.dloss[0];
    const bool aligned = columns % kVector == 0;
    Float* line = op.dlogits + m * columns;
#endif
    each8(columns, [&](int column) {
        float x[kVector] = {}, scale[kVector] = {};
        if (counted) {
            logits.read8(column, x, scale);
#pragma unroll
            for (int i = 0; i < kVector; ++i) {
                x[i] = (bounded_exponential(x[i] - shift) * factor - each) * upstream;
                if (column + i == word) x[i] -= target_weight * upstream;
                x[i] = column + i < logits.vocabulary ? x[i] : 0.0f;
            }
        }
#if ROUNDED
        uint32_t words[kVector];
        int8_t rounded[kVector];
        random8(drawn_from, op.rounded.subsequence, m * columns + column, words);
#pragma unroll
        for (int i = 0; i < kVector; ++i) rounded[i] = round_at_random(x[i] * scale[i] * s.reciprocal, words[i], q);
        store8(op.rounded.codes + m * columns + column, rounded);
#else
        if (aligned) {
            store8(line + column, x);
        } else {
#pragma unroll
            for (int i = 0; i < kVector; ++i) {
                if (column + i < columns) line[column + i] = narrow<Float>(x[i]);
            }
        }
#endif
    });
}
LSQ_EXPORT(lsq_vocabulary_loss_gradient)

// The loss by the first block, the nll by the second.
LSQ_KERNEL __launch_bounds__(ROW_THREADS)
    lsq_sum_losses(const VocabularyLoss op, In<float> losses, In<float> nlls) {
    __shared__ double part[ROW_THREADS];
    const float* of_rows = blockIdx.x ? nlls : losses;
    double sum = 0.0;
#pragma unroll 4
    for (int64_t row = threadIdx.x; row < op.prediction.rows; row += ROW_THREADS) sum += of_rows[row];
    part[threadIdx.x] = sum;
    for (int half = ROW_THREADS / 2; half; half /= 2) {
        __syncthreads();
        if (static_cast<int>(threadIdx.x) < half) part[threadIdx.x] += part[threadIdx.x + half];
    }
    if (threadIdx.x == 0) (blockIdx.x ? op.nll : op.loss)[0] = static_cast<float>(part[0]);
}
LSQ_EXPORT(lsq_sum_losses)
