// Losses of rows from tiles of logits, and their sums, in a fixed order. lsq/ops/vocabulary_loss.py
// is the reference.
#include "vocabulary_loss.cuh"

namespace {

constexpr int kThreads = 256, kSlices = kThreads / kWarp;  // threads of a row take tiles in turn

}  // namespace

// 32 rows a block. parts [2, tiles, M]: halves of LogitSums; chosen [M]: logits of the targets. A
// target outside the vocabulary makes the losses and the row's bound NaN.
LSQ_KERNEL __launch_bounds__(kThreads)
    lsq_vocabulary_losses(const VocabularyLoss op, In<float> parts, int64_t tiles, In<float> chosen,
                          Out<float> losses, Out<float> nlls) {
    wait_for_launches();
    const Prediction& given = op.prediction;
    const int64_t rows = given.rows,
                  m = static_cast<int64_t>(blockIdx.x) * kWarp + threadIdx.x % kWarp;
    const int slice = threadIdx.x / kWarp;
    LogitSums row;
    const float* from = parts;
    const float4* of_tiles = reinterpret_cast<const float4*>(from);
    if (m < rows) {
#pragma unroll 4
        for (int64_t tile = slice; tile < tiles; tile += kSlices) {
            row.add(LogitSums::load(of_tiles + tile * rows + m, tiles * rows));
        }
    }
    __shared__ float4 of_slices[2 * kThreads];  // halves of LogitSums
    row.store(of_slices + threadIdx.x, kThreads);
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
    for (int other = 1; other < kSlices; ++other) {
        row.add(LogitSums::load(of_slices + other * kWarp + threadIdx.x, kThreads));
    }
    const int64_t word = given.target[m];
    const bool known = word >= 0 && word < given.vocabulary;
    const float logit = known ? chosen[m] : not_a_number();
    const float normaliser = write_losses(op, m, row, logit, losses, nlls);
    if (!op.bound) return;
    const float factor = gradient_factor(given), share = factor / row.sum;
    const float own =
        bounded_exponential(logit - normaliser) * factor - given.each - given.target_weight;
    const float multiple = op.kept.gradient ? row.others.second : row.others.first;
    uint32_t bound =
        Largest::join(magnitude_of(multiple * share), magnitude_of(given.each * float_of(most)));
    if (!known) bound = magnitude_of(not_a_number());
    if (known && !op.kept.gradient)
        bound = Largest::join(bound, magnitude_of(own * given.weight.scale[word]));
    const bool counted = word != given.padding;
    op.bound[m] = counted ? float_of(bound) : 0.0f;
    if (!op.kept.gradient) return;
    const int64_t likeliest = row.others.word;
    const float other = row.others.first * share / given.weight.scale[likeliest] - given.each;
    op.kept.likeliest[m] = counted ? likeliest : 0;
    op.kept.gradient[m] = counted ? own : 0.0f;
    op.kept.gradient[rows + m] = counted && likeliest != word ? other : 0.0f;
}
LSQ_EXPORT(lsq_vocabulary_losses)

// The loss by the first block, the nll by the second; in double precision.
LSQ_KERNEL __launch_bounds__(kThreads)
    lsq_sum_losses(const VocabularyLoss op, In<float> losses, In<float> nlls) {
    wait_for_launches();
    const float* of_rows = blockIdx.x ? nlls : losses;
    double sum = 0.0;
#pragma unroll 4
    for (int64_t row = threadIdx.x; row < op.prediction.rows; row += kThreads) sum += of_rows[row];
    sum = block_total<kThreads>(sum);
    if (threadIdx.x == 0) (blockIdx.x ? op.nll : op.loss)[0] = static_cast<float>(sum);
}
LSQ_EXPORT(lsq_sum_losses)
