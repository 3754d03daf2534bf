// Multiplies and adds int8 as fast as one thread can: everything stays in registers.
#include <immintrin.h>

#include <cstdint>

#include "amx.h"

namespace {

volatile int32_t sink;

constexpr int kSums = 12;  // enough for the latency of two units

#if defined(__AVX512F__)

__attribute__((target("avx512vnni"))) int64_t vnni(int64_t rounds) {
    __m512i sums[kSums] = {}, a = _mm512_set1_epi8(1), b = _mm512_set1_epi8(2);
    for (int64_t round = 0; round < rounds; ++round) {
#pragma GCC unroll 12
        for (__m512i& sum : sums) sum = _mm512_dpbusd_epi32(sum, a, b);
        asm volatile("" : "+v"(a), "+v"(b));
    }
    for (const __m512i& sum : sums) sink = _mm512_reduce_add_epi32(sum);
    return 2 * rounds * kSums * 64;
}

int64_t amx(int64_t rounds) {
    const lsq::WholeTiles tiles;
    lsq::zero_tile<0>();
    lsq::zero_tile<1>();
    lsq::zero_tile<2>();
    lsq::zero_tile<3>();
    lsq::zero_tile<4>();
    lsq::zero_tile<5>();
    lsq::zero_tile<6>();
    lsq::zero_tile<7>();
    for (int64_t round = 0; round < rounds; ++round) {
        lsq::multiply_int8<0, 6, 7>();
        lsq::multiply_int8<1, 6, 7>();
        lsq::multiply_int8<2, 6, 7>();
        lsq::multiply_int8<3, 6, 7>();
        lsq::multiply_int8<4, 6, 7>();
        lsq::multiply_int8<5, 6, 7>();
    }
    return 2 * rounds * 6 * 16 * 16 * 64;
}

#else

__attribute__((target("avxvnni"))) int64_t vnni(int64_t rounds) {
    __m256i sums[kSums] = {}, a = _mm256_set1_epi8(1), b = _mm256_set1_epi8(2);
    for (int64_t round = 0; round < rounds; ++round) {
#pragma GCC unroll 12
        for (__m256i& sum : sums) sum = _mm256_dpbusd_avx_epi32(sum, a, b);
        asm volatile("" : "+x"(a), "+x"(b));
    }
    for (const __m256i& sum : sums) sink = _mm256_extract_epi32(sum, 0);
    return 2 * rounds * kSums * 32;
}

#endif

}  // namespace

// How many were multiplied and added. `with_amx`: by AMX, which this process has been granted; else by VNNI, of 512 bits where the
// compiler is told of AVX-512.
extern "C" int64_t lsq_peak(int64_t with_amx, int64_t rounds) {
#if defined(LSQ_AMX)
    if (with_amx) return amx(rounds);
#endif
    (void)with_amx;
    return vnni(rounds);
}
