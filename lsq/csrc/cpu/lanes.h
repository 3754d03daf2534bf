// Vectors of floats, as wide as the processor's registers.
#pragma once

#include <cstdint>

#include "../arithmetic.h"

#if defined(__FMA__)
#include <immintrin.h>
#endif

namespace lsq {

#if defined(__AVX512F__)
constexpr int64_t kLanes = 16;
#elif defined(__AVX2__)
constexpr int64_t kLanes = 8;
#else
constexpr int64_t kLanes = 4;
#endif

typedef float Lanes __attribute__((vector_size(4 * kLanes), may_alias));
typedef int32_t LaneWords __attribute__((vector_size(4 * kLanes), may_alias));

inline Lanes all_lanes(float x) { return x - Lanes{}; }

// a * b + c: fused where the processor can. For sums, whose order no reference prescribes.
inline Lanes multiply_add(Lanes a, Lanes b, Lanes c) {
#if defined(__AVX512F__)
    return _mm512_fmadd_ps(a, b, c);
#elif defined(__FMA__)
    return _mm256_fmadd_ps(a, b, c);
#else
    return a * b + c;
#endif
}

inline Lanes& lanes_at(float* x) { return *reinterpret_cast<Lanes*>(x); }

inline Lanes larger_lanes(Lanes a, Lanes b) { return a > b ? a : b; }  // b where one is NaN

// The largest lane of `x`, in which nothing is NaN.
inline float largest_lane(Lanes x) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps(x);
#else
    float largest = x[0];
    for (int i = 1; i < kLanes; ++i) largest = x[i] > largest ? x[i] : largest;
    return largest;
#endif
}

inline float sum_of_lanes(Lanes x) {
    float sum = 0.0f;
    for (int i = 0; i < kLanes; ++i) sum += x[i];
    return sum;
}

// The first n lanes of x, `other` in the rest.
inline Lanes first_lanes(Lanes x, int64_t n, float other) {
    LaneWords lane;
    for (int i = 0; i < kLanes; ++i) lane[i] = i;
    return lane < static_cast<int32_t>(n) ? x : all_lanes(other);
}

// Calls body(i, seen) for each whole vector i .. i + kLanes - 1 of n numbers, the last of which may have fewer:
// seen(lanes, other) is what it has of `lanes`, and `other` in the rest.
template <class Body>
inline void for_lanes(int64_t n, const Body& body) {
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes) body(i, [](Lanes x, float) { return x; });
    if (i < n) body(i, [=](Lanes x, float other) { return first_lanes(x, n - i, other); });
}

// bounded_exponential() of each lane, to an ulp.
inline Lanes bounded_exponential(Lanes x) {
    const Lanes bounded = larger_lanes(all_lanes(-87.3f), x);
    const Lanes magic = all_lanes(12582912.0f);  // 1.5 * 2^23: rounds half to even
    const Lanes shifted = multiply_add(bounded, all_lanes(1.4426950408889634f), magic), k = magic - shifted;
    const Lanes rest = multiply_add(k, all_lanes(0.693145751953125f), bounded);
    const Lanes r = multiply_add(k, all_lanes(1.428606765330187e-6f), rest);
    Lanes p = all_lanes(1.9841270e-4f);
    for (float next : {1.3888889e-3f, 8.3333333e-3f, 4.1666667e-2f, 1.6666667e-1f, 0.5f, 1.0f, 1.0f}) {
        p = multiply_add(p, r, all_lanes(next));
    }
    const Lanes result = p * (Lanes)(((LaneWords)shifted << 23) + 0x3F800000);  // the low bits of `shifted` are -k
    return x < -87.3f ? Lanes{} : result;
}

}  // namespace lsq
