// Philox4x32-7 (Salmon et al. 2011), many counters at a time; see lsq/quant/random.py for keys and
// counters.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "../include/arithmetic.h"

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace lsq {

constexpr int64_t kPhiloxWords = 64;  // words that one call of philox_batch makes

#if defined(__AVX512F__)

// Counters group .. group + 7 and other .. other + 7, as 32-bit words in 64-bit lanes, whose upper
// halves the multiplication ignores. The first two rounds compute common parts once, as scalars.
inline void philox_batch(uint32_t key0, uint32_t key1, uint32_t subsequence, uint64_t group,
                         uint64_t other, uint32_t* out) {
    const uint64_t begins[2] = {group, other};
    // Upper words differ.
    if (static_cast<uint32_t>(group) > 0xFFFFFFF8u || static_cast<uint32_t>(other) > 0xFFFFFFF8u) {
        const uint64_t key = static_cast<uint64_t>(key1) << 32 | key0;
        for (uint64_t i = 0; i < kPhiloxWords / 4; ++i) {
            std::memcpy(out + 4 * i, philox_group(key, subsequence, begins[i / 8] + i % 8).word,
                        16);
        }
        return;
    }
    const __m512i multiplier0 = _mm512_set1_epi64(kPhiloxMultiplier0);
    const __m512i multiplier1 = _mm512_set1_epi64(kPhiloxMultiplier1);
    const __m512i lanes = _mm512_set_epi64(7, 6, 5, 4, 3, 2, 1, 0),
                  first_key = _mm512_set1_epi64(key1);
    const uint64_t same1 = static_cast<uint64_t>(subsequence) * kPhiloxMultiplier1;
    const uint32_t upper_key = static_cast<uint32_t>(same1 >> 32) ^ key0;
    key0 += kPhiloxWeyl0;
    key1 += kPhiloxWeyl1;
    const __m512i second_key0 = _mm512_set1_epi64(key0 ^ static_cast<uint32_t>(same1));
    __m512i c0[2], c1[2], c2[2], c3[2];
    for (int half = 0; half < 2; ++half) {
        const uint32_t same = upper_key ^ static_cast<uint32_t>(begins[half] >> 32);
        const uint64_t same0 = static_cast<uint64_t>(same) * kPhiloxMultiplier0;
        const __m512i counters =
            _mm512_add_epi64(_mm512_set1_epi64(static_cast<int64_t>(begins[half])), lanes);
        const __m512i p0 = _mm512_mul_epu32(counters, multiplier0);
        const __m512i p1 =
            _mm512_mul_epu32(_mm512_xor_si512(_mm512_srli_epi64(p0, 32), first_key), multiplier1);
        c0[half] = _mm512_xor_si512(_mm512_srli_epi64(p1, 32), second_key0);
        c1[half] = p1;
        c2[half] =
            _mm512_xor_si512(p0, _mm512_set1_epi64(key1 ^ static_cast<uint32_t>(same0 >> 32)));
        c3[half] = _mm512_set1_epi64(static_cast<int64_t>(same0));
    }
    for (int round = 2; round < kPhiloxRounds; ++round) {
        key0 += kPhiloxWeyl0;
        key1 += kPhiloxWeyl1;
        const __m512i k0 = _mm512_set1_epi64(key0), k1 = _mm512_set1_epi64(key1);
        for (int half = 0; half < 2; ++half) {
            const __m512i p0 = _mm512_mul_epu32(c0[half], multiplier0),
                          p1 = _mm512_mul_epu32(c2[half], multiplier1);
            // A ^ b ^ c.
            c0[half] = _mm512_ternarylogic_epi64(_mm512_srli_epi64(p1, 32), c1[half], k0, 0x96);
            c2[half] = _mm512_ternarylogic_epi64(_mm512_srli_epi64(p0, 32), c3[half], k1, 0x96);
            c1[half] = p1;
            c3[half] = p0;
        }
    }
    const __m512i first = _mm512_set_epi64(11, 3, 10, 2, 9, 1, 8, 0),
                  second = _mm512_set_epi64(15, 7, 14, 6, 13, 5, 12, 4);
    for (int half = 0; half < 2; ++half) {
        const __m512i low = _mm512_mask_shuffle_epi32(c0[half], 0xAAAA, c1[half], _MM_PERM_CCAA);
        const __m512i high = _mm512_mask_shuffle_epi32(c2[half], 0xAAAA, c3[half], _MM_PERM_CCAA);
        _mm512_storeu_si512(out + 32 * half, _mm512_permutex2var_epi64(low, first, high));
        _mm512_storeu_si512(out + 32 * half + 16, _mm512_permutex2var_epi64(low, second, high));
    }
}

#else

inline void philox_batch(uint32_t key0, uint32_t key1, uint32_t subsequence, uint64_t group,
                         uint64_t other, uint32_t* out) {
    constexpr int kLanes = kPhiloxWords / 4;
    uint32_t c0[kLanes], c1[kLanes], c2[kLanes], c3[kLanes];
    for (int i = 0; i < kLanes; ++i) {
        const uint64_t counter = i < kLanes / 2 ? group + i : other + (i - kLanes / 2);
        c0[i] = static_cast<uint32_t>(counter);
        c1[i] = static_cast<uint32_t>(counter >> 32);
        c2[i] = subsequence;
        c3[i] = 0;
    }
    for (int round = 0; round < kPhiloxRounds; ++round) {
        for (int i = 0; i < kLanes; ++i) {
            const uint64_t p0 = static_cast<uint64_t>(c0[i]) * kPhiloxMultiplier0;
            const uint64_t p1 = static_cast<uint64_t>(c2[i]) * kPhiloxMultiplier1;
            c0[i] = static_cast<uint32_t>(p1 >> 32) ^ c1[i] ^ key0;
            c1[i] = static_cast<uint32_t>(p1);
            c2[i] = static_cast<uint32_t>(p0 >> 32) ^ c3[i] ^ key1;
            c3[i] = static_cast<uint32_t>(p0);
        }
        key0 += kPhiloxWeyl0;
        key1 += kPhiloxWeyl1;
    }
    for (int i = 0; i < kLanes; ++i) {
        out[4 * i] = c0[i];
        out[4 * i + 1] = c1[i];
        out[4 * i + 2] = c2[i];
        out[4 * i + 3] = c3[i];
    }
}

#endif

// Words [first, first + n) of a subsequence; `first` must be a multiple of 4.
inline void philox(int64_t key, int64_t subsequence, int64_t first, int64_t n, uint32_t* out) {
    const uint32_t key0 = static_cast<uint32_t>(key),
                   key1 = static_cast<uint32_t>(static_cast<uint64_t>(key) >> 32);
    int64_t done = 0;
    for (; done < n; done += kPhiloxWords) {
        const uint64_t group = static_cast<uint64_t>(first + done) / 4;
        if (n - done >= kPhiloxWords) {
            philox_batch(key0, key1, static_cast<uint32_t>(subsequence), group, group + 8,
                         out + done);
            continue;
        }
        uint32_t words[kPhiloxWords];
        philox_batch(key0, key1, static_cast<uint32_t>(subsequence), group, group + 8, words);
        std::memcpy(out + done, words, sizeof(uint32_t) * (n - done));
    }
}

// Half of kPhiloxWords from `first` on, then as many from `other` on; both must be multiples of 4.
inline void philox_pair(int64_t key, int64_t subsequence, int64_t first, int64_t other,
                        uint32_t* out) {
    philox_batch(static_cast<uint32_t>(key),
                 static_cast<uint32_t>(static_cast<uint64_t>(key) >> 32),
                 static_cast<uint32_t>(subsequence), static_cast<uint64_t>(first) / 4,
                 static_cast<uint64_t>(other) / 4, out);
}

}  // namespace lsq
