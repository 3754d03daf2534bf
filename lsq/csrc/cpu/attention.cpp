// Softmax over keys with padding and future masks and dropout, forward and backward, in place.
#include "loops.h"

using namespace lsq;

namespace {

// Dropout of a whole matrix [numel] that begins at element `first` of its tensor, from `in` to `out`.
void drop_matrix(const Dropout& dropout, int64_t first, int64_t numel, const float* in, float* out) {
    constexpr int64_t kChunk = 1024;
    uint32_t words[kChunk + 8];
    for (int64_t done = 0; done < numel; done += kChunk) {
        const int64_t n = std::min(kChunk, numel - done);
        if (in != out) std::memcpy(out + done, in + done, n * sizeof(float));
        dropout.apply(first + done, n, out + done, words);
    }
}

}  // namespace

// scores [B * N, T, S] -> probabilities, in place; padding bool [B, S] or null; `dropped` gets them after dropout
// (it is `scores` itself where nothing is dropped).
LSQ_EXPORT void lsq_masked_softmax(float* scores, const uint8_t* padding, const int64_t* key, int64_t stream,
                                   int64_t threshold, float keep, int64_t causal, float* dropped, int64_t batch,
                                   int64_t heads, int64_t time, int64_t source) {
    const Dropout dropout{key, stream, threshold, keep};
    const float minus_infinity = -std::numeric_limits<float>::infinity();
#pragma omp parallel for schedule(static)
    for (int64_t matrix = 0; matrix < batch * heads; ++matrix) {
        const uint8_t* masked = padding ? padding + matrix / heads * source : nullptr;
        float* first_row = scores + matrix * time * source;
        for (int64_t t = 0; t < time; ++t) {
            float* x = first_row + t * source;
            const int64_t visible = causal ? t + 1 + source - time : source;
#pragma omp simd
            for (int64_t s = visible; s < source; ++s) x[s] = minus_infinity;
            if (masked) {
                for (int64_t s = 0; s < source; ++s) x[s] = masked[s] ? minus_infinity : x[s];
            }
            float largest = minus_infinity;
#pragma omp simd reduction(max : largest)
            for (int64_t s = 0; s < source; ++s) largest = x[s] > largest ? x[s] : largest;
            float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
            for (int64_t s = 0; s < source; ++s) {
                x[s] = exponential(x[s] - largest);
                sum += x[s];
            }
#pragma omp simd
            for (int64_t s = 0; s < source; ++s) x[s] /= sum;
        }
        if (threshold) {
            const int64_t first = matrix * time * source;
            drop_matrix(dropout, first, time * source, first_row, dropped + first);
        }
    }
}

// probabilities [rows, S]; gradient [rows, S] of the dropped probabilities -> gradient of the scores, in place.
LSQ_EXPORT void lsq_softmax_backward(const float* probabilities, const int64_t* key, int64_t stream, int64_t threshold,
                                     float keep, float* gradient, int64_t rows, int64_t source) {
    const Dropout dropout{key, stream, threshold, keep};
    const Blocks blocks(rows);
#pragma omp parallel for schedule(static)
    for (int64_t block = 0; block < blocks.count; ++block) {
        const int64_t begin = blocks.begin(block), end = blocks.end(block);
        if (threshold && begin < end) {
            float* g = gradient + begin * source;
            drop_matrix(dropout, begin * source, (end - begin) * source, g, g);
        }
        for (int64_t row = begin; row < end; ++row) {
            const float* p = probabilities + row * source;
            float* g = gradient + row * source;
            float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
            for (int64_t s = 0; s < source; ++s) {
                g[s] *= p[s];
                sum += g[s];
            }
#pragma omp simd
            for (int64_t s = 0; s < source; ++s) g[s] -= p[s] * sum;
        }
    }
}
