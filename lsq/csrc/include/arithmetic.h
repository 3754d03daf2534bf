// Arithmetic shared by CPU loops, CUDA kernels and their emulator, so that all round alike.
//
// Compiled for the host and by NVRTC, which has no standard headers. Floats are float32; nothing
// may be contracted into fused multiply-adds except multiply_add.
#pragma once

#ifdef __CUDACC_RTC__
#define LSQ_INLINE __device__ __forceinline__
using int8_t = signed char;
using uint8_t = unsigned char;
using uint16_t = unsigned short;
using int32_t = int;
using uint32_t = unsigned int;
using int64_t = long long;
using uint64_t = unsigned long long;
#else
#ifndef LSQ_EMULATOR  // which declares what kernels use
#include <cmath>
#endif
#include <cstdint>
#include <cstring>
#define LSQ_INLINE inline
#endif

namespace lsq {

// Rows whose largest magnitude lies below are rounded to zero.
constexpr float kSmallestGradient = 1e-35f;
// Below, what a quotient leaves may vanish: values must be divided.
constexpr float kSmallestClip = 1e-25f;

LSQ_INLINE uint32_t bits_of(float x) {
#ifdef __CUDACC_RTC__
    return __float_as_uint(x);
#else
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    return bits;
#endif
}

LSQ_INLINE float float_of(uint32_t bits) {
#ifdef __CUDACC_RTC__
    return __uint_as_float(bits);
#else
    float x;
    std::memcpy(&x, &bits, 4);
    return x;
#endif
}

LSQ_INLINE float infinity() { return float_of(0x7F800000u); }
LSQ_INLINE float not_a_number() { return float_of(0x7FC00000u); }

// |x| as its bits, which order like magnitudes; NaN is larger than infinity.
using Magnitude = uint32_t;
constexpr Magnitude kMissing = 0x7FC00000u;
LSQ_INLINE Magnitude magnitude_of(float x) { return bits_of(x) & 0x7FFFFFFFu; }
LSQ_INLINE bool is_missing(Magnitude x) { return x > 0x7F800000u; }
// The clip of values whose largest magnitude is x, at least 2^-40. For zeros it stays: gradients
// carry the scales of rows, and a tiny one would vanish; it becomes 1 if it was not finite.
LSQ_INLINE float clip_of(Magnitude x, float before) {
    const Magnitude least = 0x2B800000u;
    if (x == 0) return magnitude_of(before) < 0x7F800000u ? before : 1.0f;
    return float_of(x > least ? x : least);
}

// A scale that is NaN if a value was NaN, so that NaN reaches whatever reads the codes.
LSQ_INLINE float poisoned(float scale, bool missing) { return missing ? not_a_number() : scale; }

// x / scale within [-q, q], rounded half to even; 0 for NaN.
LSQ_INLINE int8_t code_of(float scaled, float q) {
    const float low = scaled < -q ? -q : scaled;
    const float bounded = low > q ? q : low;
    return static_cast<int8_t>(static_cast<int32_t>(nearbyintf(scaled == scaled ? bounded : 0.0f)));
}

struct GradientScale {
    float scale, reciprocal;
};

// Scale of gradients whose largest magnitude becomes code q: (0, 0) for vanishing ones, (NaN, 0)
// for non-finite ones.
LSQ_INLINE GradientScale gradient_scale(float largest, float q) {
    if (!(largest < infinity())) return {not_a_number(), 0.0f};
    if (largest < kSmallestGradient) return {0.0f, 0.0f};
    return {largest / q, q / largest};
}

// Scale of values in a message, a bfloat16 rounded up, so that no value exceeds q.
LSQ_INLINE GradientScale message_scale(float largest, float q) {
    const GradientScale exact = gradient_scale(largest, q);
    if (exact.reciprocal == 0.0f) return exact;
    const float scale = float_of((bits_of(exact.scale) + 0xFFFFu) & 0xFFFF0000u);
    return {scale, 1.0f / scale};
}

// The scale of codes is the product of row_scale and shared_scale.
template <class Codes>
LSQ_INLINE float row_scale(const Codes& coded, int64_t row) {
    return coded.by_row ? coded.scale[row] : 1.0f;
}
template <class Codes>
LSQ_INLINE float shared_scale(const Codes& coded) {
    return coded.by_row ? 1.0f : coded.scale[0];
}

// x times the reciprocal of its GradientScale, rounded half to even; no bounds are needed. x is
// finite.
LSQ_INLINE int8_t nearest_code(float scaled) {
    // 1.5 * 2^23: leaves the whole number in the last bits.
    return static_cast<int8_t>(bits_of(scaled + 12582912.0f));
}

// Rounds without bias: up with a probability equal to the fraction. `word` is 32 random bits, of
// which 24 count. Not NaN.
LSQ_INLINE int8_t round_finite_at_random(float scaled, uint32_t word, float q) {
    // 2^-24.
    const float uniform =
        static_cast<float>(static_cast<int32_t>(word >> 8)) * 5.9604644775390625e-8f;
    float rounded = floorf(scaled + uniform);
    rounded = rounded < -q ? -q : rounded;
    rounded = rounded > q ? q : rounded;
    return static_cast<int8_t>(static_cast<int32_t>(rounded));
}

// a * b + c, rounded once where the processor can.
LSQ_INLINE float multiply_add(float a, float b, float c) {
#if defined(__FMA__) || defined(__CUDACC__) || defined(LSQ_EMULATOR)
    return fmaf(a, b, c);
#else
    return a * b + c;
#endif
}

// exp(x) for x <= 88 and NaN to about 2 ulp, 0 below -87: 2^k * 2^r with |r| <= 1/2 and a
// polynomial for 2^r, as in csrc/cpu/lanes.h, but with the rest of log2(e), which counts for x far
// from 0.
LSQ_INLINE float bounded_exponential(float x) {
    const float bounded = x < -87.0f ? -87.0f : x, octaves = 1.4426950408889634f;
    // 1.5 * 2^23: rounds half to even; 127: the exponent's bias.
    const float shifted = multiply_add(bounded, octaves, 12582912.0f + 127.0f);
    const float r = multiply_add(bounded, 1.925963033e-8f,
                                 multiply_add(bounded, octaves, (12582912.0f + 127.0f) - shifted));
    float p = 1.535336196e-4f;
    p = multiply_add(p, r, 1.339887502e-3f);
    p = multiply_add(p, r, 9.618436918e-3f);
    p = multiply_add(p, r, 5.550332367e-2f);
    p = multiply_add(p, r, 2.402264774e-1f);
    p = multiply_add(p, r, 6.931471825e-1f);
    p = multiply_add(p, r, 1.0f);
    const float result = p * float_of(bits_of(shifted) << 23);
    return x < -87.0f ? 0.0f : result;
}

struct Normal {
    float below, density;
};

// The standard normal distribution: the share below x and the density at x, with absolute errors
// below 2e-7. One exponential serves both: M. Abramowitz and I. A. Stegun, Handbook of Mathematical
// Functions, 7.1.26.
LSQ_INLINE Normal normal(float x) {
    const float bell = bounded_exponential(-0.5f * x * x),
                t = 1.0f / (1.0f + 0.23164189f * fabsf(x));
    float p = 1.061405429f;
    p = multiply_add(p, t, -1.453152027f);
    p = multiply_add(p, t, 1.421413741f);
    p = multiply_add(p, t, -0.284496736f);
    p = multiply_add(p, t, 0.254829592f);
    const float beyond = 0.5f * p * t * bell;
    return {x < 0.0f ? beyond : 1.0f - beyond, bell * 0.39894228040143268f};
}

LSQ_INLINE float gelu(float x) { return x * normal(x).below; }

LSQ_INLINE float gelu_slope(float x) {
    const Normal at = normal(x);
    return at.below + x * at.density;
}

struct Logistic {
    float value, slope;
};

// 1 / (1 + exp(-x)) and its derivative.
LSQ_INLINE Logistic logistic(float x) {
    const float less = bounded_exponential(x < 0.0f ? x : -x), near = 1.0f / (1.0f + less),
                far = less * near;
    return {x < 0.0f ? far : near, far * near};
}

// x * logistic(x), also called swish.
LSQ_INLINE float silu(float x) { return x * logistic(x).value; }

LSQ_INLINE float silu_slope(float x) {
    const Logistic gate = logistic(x);
    return gate.value + x * gate.slope;
}

// x / 2 * (1 + tanh(z / 2)) = x * logistic(z), z = sqrt(8 / pi) * (x + 0.044715 x^3).
LSQ_INLINE float gelu_tanh(float x) {
    return x * logistic(1.5957691216057308f * x * (1.0f + 0.044715f * x * x)).value;
}

LSQ_INLINE float gelu_tanh_slope(float x) {
    // Flat beyond.
    const float low = x < -10.0f ? -10.0f : x, y = low > 10.0f ? 10.0f : low, square = y * y;
    const Logistic gate = logistic(1.5957691216057308f * y * (1.0f + 0.044715f * square));
    return gate.value + y * gate.slope * (1.5957691216057308f * (1.0f + 0.134145f * square));
}

constexpr float kSlopeUnit = 112.0f;  // a slope times this, rounded, is an int8
constexpr float kSteepest = 1.13f;    // slopes of GELU, its form with tanh, and SiLU stay below

// 0 for NaN.
LSQ_INLINE int8_t slope_code(float slope) {
    return code_of(slope * kSlopeUnit, kSteepest * kSlopeUnit);
}

LSQ_INLINE float slope_of(int32_t code) { return static_cast<float>(code) * (1.0f / kSlopeUnit); }

LSQ_INLINE float relu(float x) { return x < 0.0f ? 0.0f : x; }  // NaN stays NaN

LSQ_INLINE float squared_relu(float x) { return relu(x) * relu(x); }

LSQ_INLINE float squared_relu_slope(float x) { return 2.0f * relu(x); }

constexpr int kPhiloxRounds = 7;
constexpr uint32_t kPhiloxMultiplier0 = 0xD2511F53u, kPhiloxMultiplier1 = 0xCD9E8D57u;
constexpr uint32_t kPhiloxWeyl0 = 0x9E3779B9u, kPhiloxWeyl1 = 0xBB67AE85u;

struct PhiloxWords {
    uint32_t word[4];
};

// Philox4x32-7 (Salmon et al. 2011): words 4 * group .. 4 * group + 3 of a subsequence; see
// lsq/quant/random.py.
LSQ_INLINE PhiloxWords philox_group(uint64_t key, uint32_t subsequence, uint64_t group) {
    uint32_t key0 = static_cast<uint32_t>(key), key1 = static_cast<uint32_t>(key >> 32);
    uint32_t c0 = static_cast<uint32_t>(group), c1 = static_cast<uint32_t>(group >> 32),
             c2 = subsequence, c3 = 0;
    for (int round = 0; round < kPhiloxRounds; ++round) {
        const uint64_t p0 = static_cast<uint64_t>(c0) * kPhiloxMultiplier0;
        const uint64_t p1 = static_cast<uint64_t>(c2) * kPhiloxMultiplier1;
        c0 = static_cast<uint32_t>(p1 >> 32) ^ c1 ^ key0;
        c1 = static_cast<uint32_t>(p1);
        c2 = static_cast<uint32_t>(p0 >> 32) ^ c3 ^ key1;
        c3 = static_cast<uint32_t>(p0);
        key0 += kPhiloxWeyl0;
        key1 += kPhiloxWeyl1;
    }
    return {{c0, c1, c2, c3}};
}

// Word `element` of a subsequence alone.
LSQ_INLINE uint32_t philox_word(uint64_t key, uint32_t subsequence, uint64_t element) {
    const PhiloxWords group = philox_group(key, subsequence, element / 4);
    // An index that is known only at run time would send the words to a GPU's local memory.
    const uint32_t low = element & 1 ? group.word[1] : group.word[0],
                   high = element & 1 ? group.word[3] : group.word[2];
    return element & 2 ? high : low;
}

// Column n of a row is rounded at random with the row's philox_word plus n times this.
constexpr uint32_t kWordStep = 0x9E3779B9u;

// Most keys of a sentence, for the elements of probabilities.
constexpr int64_t kKeys = int64_t{1} << 31;

// The element of the probability of key 0; see lsq/ops/attention.py.
LSQ_INLINE int64_t probability_element(int64_t row, int64_t heads, int64_t head) {
    return (row * heads + head) * kKeys;
}

}  // namespace lsq
