// The losses of rows, from what tiles of logits have left of them, and their sums, in a fixed order.
//
// lsq/ops/vocabulary_loss.py is the reference.
#include "vocabulary_loss.cuh"

namespace {

constexpr int kThreads = 256, kSlices = kThreads / kWarp;  // threads of a row take tiles in turn

}  // namespace

// 32 rows a block. parts [tiles, M] LogitSums; chosen [M]: the logits of the targets. A target outside the vocabulary makes
// the losses and the row's bound NaN.
LSQ_KERNEL __launch_bounds__(kThreads) lsq_vocabulary_losses(
    const VocabularyLoss op, In<float> parts, int64_t tiles, In<float> chosen, Out<float> losses, Out<float> nlls) {
    const Prediction& given = op.prediction;
    const int64_t rows = given.rows, m = static_cast<int64_t>(blockIdx.x) * kWarp + threadIdx.x % kWarp;
    const int slice = threadIdx.x / kWarp;
    LogitSums row;
    if (m < rows) {
#pragma unroll 4
        for (int64_t tile = slice; tile < tiles; tile += kSlices) {
            row.add(load_words<LogitSums>(parts + 4 * (tile * rows + m)));
        }
    }
    __shared__ float4 of_slices[kThreads];  // LogitSums
    store_words(of_slices + threadIdx.x, row);
    uint32_t most = 0;  // of the weight's scales
    if (op.bound) {
#pragma unroll 8
        for (int64_t v = threadIdx.x; v < given.vocabulary; v += kThreads) {
            most = Largest::join(most, magnitude_of(given.weight.scale[v]));
        }
        most = group_reduce<Largest, kThreads, kThreads>(most);
    }
    __syncthreads();
    if (slice != 0 || m >= rows) return;
#pragma unroll 1
    for (int other = 1; other < kSlices; ++other) row.add(load_words<LogitSums>(of_slices + other * kWarp + threadIdx.x));
    const int64_t word = given.target[m];
    const bool known = word >= 0 && word < given.vocabulary;
    const float logit = known ? chosen[m] : not_a_number();
    const float normaliser = write_losses(op, m, row, logit, losses, nlls);
    if (!op.bound) return;
    const float factor = gradient_factor(given), share = factor / row.sum;
    const float own = bounded_exponential(logit - normaliser) * factor - given.each - given.target_weight;
    uint32_t found = Largest::join(magnitude_of(row.scaled * share), magnitude_of(given.each * float_of(most)));
    if (!known) found = magnitude_of(not_a_number());
    if (known && !op.target_gradient) found = Largest::join(found, magnitude_of(own * given.weight.scale[word]));
    const bool counted = word != given.padding;
    op.bound[m] = counted ? float_of(found) : 0.0f;
    if (op.target_gradient) op.target_gradient[m] = counted ? own : 0.0f;
}
LSQ_EXPORT(lsq_vocabulary_losses)

// The loss by the first block, the nll by the second; in double precision.
LSQ_KERNEL __launch_bounds__(kThreads) lsq_sum_losses(const VocabularyLoss op, In<float> losses, In<float> nlls) {
    __shared__ double part[kThreads];
    const float* of_rows = blockIdx.x ? nlls : losses;
    double sum = 0.0;
#pragma unroll 4
    for (int64_t row = threadIdx.x; row < op.prediction.rows; row += kThreads) sum += of_rows[row];
    part[threadIdx.x] = sum;
    for (int half = kThreads / 2; half; half /= 2) {
        __syncthreads();
        if (static_cast<int>(threadIdx.x) < half) part[threadIdx.x] += part[threadIdx.x + half];
    }
    if (threadIdx.x == 0) (blockIdx.x ? op.nll : op.loss)[0] = static_cast<float>(part[0]);
}
LSQ_EXPORT(lsq_sum_losses)
