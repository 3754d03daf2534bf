// Stores that go past the caches, for what is not read again soon: a store into a cache reads the
// line first.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace lsq {

// x [n] to `out`; other threads see it after finish_stream().
inline void stream(const float* x, int64_t n, float* out) {
#if defined(__AVX512F__)
    if (n % 16 == 0 && reinterpret_cast<uintptr_t>(out) % 64 == 0) {
        for (int64_t i = 0; i < n; i += 16) _mm512_stream_ps(out + i, _mm512_loadu_ps(x + i));
        return;
    }
#elif defined(__AVX2__)
    if (n % 8 == 0 && reinterpret_cast<uintptr_t>(out) % 32 == 0) {
        for (int64_t i = 0; i < n; i += 8) _mm256_stream_ps(out + i, _mm256_loadu_ps(x + i));
        return;
    }
#endif
    std::memcpy(out, x, n * sizeof(float));
}

inline void finish_stream() {
#if defined(__AVX2__)
    _mm_sfence();
#endif
}

}  // namespace lsq
