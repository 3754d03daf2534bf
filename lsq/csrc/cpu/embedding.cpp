// Rows of words plus rows of positions, time-major, and the scatter of their gradient.
#include "rows.h"

using namespace lsq;

// tokens, places int64 [B, T], weight [V, n], table [P, n] -> x [T * B, n].
LSQ_EXPORT void lsq_embedding(const int64_t* tokens, const int64_t* places, const float* weight, const float* table,
                              const int64_t* key, int64_t stream, int64_t threshold, float keep, float scale, float* x,
                              int64_t batch, int64_t time, int64_t n) {
    const Dropout dropout{key, stream, threshold, keep};
#pragma omp parallel
    {
        std::vector<uint32_t> words(n + 8);
#pragma omp for schedule(static)
        for (int64_t row = 0; row < batch * time; ++row) {
            const int64_t t = row / batch, b = row % batch;
            const float* word = weight + tokens[b * time + t] * n;
            const float* place = table + places[b * time + t] * n;
            float* out = x + row * n;
#pragma omp simd
            for (int64_t i = 0; i < n; ++i) out[i] = word[i] * scale + place[i];
            dropout.apply(row * n, n, out, words.data());
        }
    }
}

// gradient [T * B, n] -> dweight [V, n], dtable [P, n] or null. Each thread owns a strip of columns: no atomics, and the
// order of the additions is that of the sentences.
LSQ_EXPORT void lsq_embedding_backward(const float* gradient, const int64_t* tokens, const int64_t* places,
                                       const int64_t* key, int64_t stream, int64_t threshold, float keep, float scale,
                                       int64_t padding, float* dweight, int64_t vocabulary, float* dtable,
                                       int64_t positions, int64_t batch, int64_t time, int64_t n) {
    constexpr int64_t kStrip = 64;
    const Dropout dropout{key, stream, threshold, keep};
    const int64_t strips = (n + kStrip - 1) / kStrip;
#pragma omp parallel for schedule(static)
    for (int64_t row = 0; row < vocabulary; ++row) std::memset(dweight + row * n, 0, n * sizeof(float));
    if (dtable) std::memset(dtable, 0, positions * n * sizeof(float));
#pragma omp parallel for schedule(static)
    for (int64_t strip = 0; strip < strips; ++strip) {
        const int64_t begin = strip * kStrip, width = std::min(kStrip, n - begin);
        float g[kStrip];
        uint32_t words[kStrip + 8];
        for (int64_t b = 0; b < batch; ++b) {
            for (int64_t t = 0; t < time; ++t) {
                const int64_t token = tokens[b * time + t];
                if (token == padding) continue;
                const int64_t first = (t * batch + b) * n + begin;
                std::memcpy(g, gradient + first, width * sizeof(float));
                dropout.apply(first, width, g, words);
                float* word = dweight + token * n + begin;
#pragma omp simd
                for (int64_t i = 0; i < width; ++i) word[i] += g[i] * scale;
                if (dtable) {
                    float* place = dtable + places[b * time + t] * n + begin;
#pragma omp simd
                    for (int64_t i = 0; i < width; ++i) place[i] += g[i];
                }
            }
        }
    }
}
