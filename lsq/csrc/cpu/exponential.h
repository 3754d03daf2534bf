// exp and erf that the compiler can vectorise.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

namespace lsq {

// exp(x) to about 2 ulp: 2^k * exp(r) with |r| <= ln(2) / 2, a Taylor polynomial of degree 7 for exp(r).
// 0 below -87.3, infinity above 88.7, NaN for NaN.
inline float exponential(float x) {
    const float bounded = x < -87.3f ? -87.3f : (x > 88.7f ? 88.7f : x);
    const float safe = bounded == bounded ? bounded : 0.0f;
    const float k = std::nearbyint(safe * 1.4426950408889634f);
    const float r = (safe - k * 0.693145751953125f) - k * 1.428606765330187e-6f;
    float p = 1.9841270e-4f;
    p = p * r + 1.3888889e-3f;
    p = p * r + 8.3333333e-3f;
    p = p * r + 4.1666667e-2f;
    p = p * r + 1.6666667e-1f;
    p = p * r + 0.5f;
    p = (p * r * r + r) + 1.0f;
    // 2^k in two factors, because k = 128 has no float of its own.
    const int32_t whole = static_cast<int32_t>(k), half = whole >> 1;
    const int32_t low_bits = (half + 127) << 23, high_bits = (whole - half + 127) << 23;
    float low, high;
    std::memcpy(&low, &low_bits, 4);
    std::memcpy(&high, &high_bits, 4);
    float result = p * low * high;
    result = x < -87.3f ? 0.0f : result;
    result = x > 88.7f ? INFINITY : result;
    return x == x ? result : x;
}

// erf(x) with absolute error below 2e-7: W. H. Press et al.'s Chebyshev fit of erfc (Numerical Recipes, section 6.2).
inline float error_function(float x) {
    const float z = std::fabs(x), t = 1.0f / (1.0f + 0.5f * z);
    float p = 0.17087277f;
    p = p * t - 0.82215223f;
    p = p * t + 1.48851587f;
    p = p * t - 1.13520398f;
    p = p * t + 0.27886807f;
    p = p * t - 0.18628806f;
    p = p * t + 0.09678418f;
    p = p * t + 0.37409196f;
    p = p * t + 1.00002368f;
    const float positive = 1.0f - t * exponential(t * p - z * z - 1.26551223f);
    return x < 0.0f ? -positive : positive;
}

}  // namespace lsq
