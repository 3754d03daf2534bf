// Packed bits: element i of a mask is bit i % 8 of byte i / 8.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace lsq {

// flags [n], 0 or 1 each -> bits.
inline void pack_bits(const uint8_t* flags, int64_t n, uint8_t* out) {
    int64_t i = 0;
#if defined(__AVX512BW__)
    for (; i + 64 <= n; i += 64) {
        const __m512i v = _mm512_loadu_si512(flags + i);
        const uint64_t bits = _mm512_test_epi8_mask(v, v);
        std::memcpy(out + i / 8, &bits, 8);
    }
#elif defined(__AVX2__)
    for (; i + 32 <= n; i += 32) {
        const __m256i v = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(flags + i));
        const int32_t bits = _mm256_movemask_epi8(_mm256_slli_epi16(v, 7));  // of the highest bits
        std::memcpy(out + i / 8, &bits, 4);
    }
#endif
    for (; i + 8 <= n; i += 8) {
        uint64_t eight;
        std::memcpy(&eight, flags + i, 8);
        out[i / 8] = static_cast<uint8_t>((eight * 0x0102040810204080ull) >> 56);
    }
    if (i < n) {
        uint8_t last = 0;
        for (int64_t j = i; j < n; ++j) last |= static_cast<uint8_t>(flags[j] << (j - i));
        out[i / 8] = last;
    }
}

// x [n] becomes 0 where a bit is not set.
inline void keep_where(const uint8_t* bits, int64_t n, float* x) {
    int64_t i = 0;
#if defined(__AVX512F__)
    for (; i + 16 <= n; i += 16) {
        uint16_t mask;
        std::memcpy(&mask, bits + i / 8, 2);
        _mm512_storeu_ps(x + i, _mm512_maskz_loadu_ps(mask, x + i));
    }
#endif
    for (; i + 8 <= n; i += 8) {
        const uint32_t eight = bits[i / 8];
#pragma omp simd
        for (int64_t j = 0; j < 8; ++j) x[i + j] = eight & (1u << j) ? x[i + j] : 0.0f;
    }
    for (; i < n; ++i) x[i] = bits[i / 8] >> (i % 8) & 1 ? x[i] : 0.0f;
}

// x [n] becomes 0 where one of the bits [first, first + n) is not set.
inline void keep_where(const uint8_t* bits, int64_t first, int64_t n, float* x) {
    if (first % 8 == 0) return keep_where(bits + first / 8, n, x);
    for (int64_t i = 0; i < n; ++i)
        x[i] = bits[(first + i) / 8] >> ((first + i) % 8) & 1 ? x[i] : 0.0f;
}

// Calls work(i) for each bit that is set among bits [first, first + n), in order; few are.
template <class Work>
void each_bit(const uint8_t* bits, int64_t first, int64_t n, const Work& work) {
    for (int64_t i = -(first % 8); i < n; i += 8) {
        const uint8_t* at = bits + (first + i) / 8;
        uint64_t eight;
        while (i + 64 <= n && (std::memcpy(&eight, at, 8), eight == 0)) i += 64, at += 8;
        if (i >= n || !*at) continue;
        for (int64_t j = i < 0 ? 0 : i; j < i + 8 && j < n; ++j) {
            if (*at >> (j - i) & 1) work(j);
        }
    }
}

}  // namespace lsq
