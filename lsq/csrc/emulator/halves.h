// Half-precision floats as their bits: what the conversion instructions of a GPU do. Rounds to nearest even.
#pragma once

#include <cstdint>
#include <cstring>

inline uint16_t emulator_float_to_bfloat16(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    if (x != x) return 0x7FFF;
    return static_cast<uint16_t>((bits + 0x7FFFu + (bits >> 16 & 1)) >> 16);
}

inline float emulator_half_to_float(uint16_t half) {
    const uint32_t sign = static_cast<uint32_t>(half & 0x8000) << 16;
    const uint32_t exponent = half >> 10 & 31, fraction = half & 1023;
    uint32_t bits = sign | (exponent + 112) << 23 | fraction << 13;
    if (exponent == 31) bits = sign | 0x7F800000u | fraction << 13;
    float x;
    if (exponent == 0) {  // zero or below the normal range: a multiple of 2^-24
        x = static_cast<float>(fraction) * 5.9604644775390625e-8f;
        return sign ? -x : x;
    }
    std::memcpy(&x, &bits, 4);
    return x;
}

inline uint16_t emulator_float_to_half(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    const uint32_t sign = bits >> 16 & 0x8000, magnitude = bits & 0x7FFFFFFFu;
    if (x != x) return 0x7FFF;
    if (magnitude >= 0x477FF000u) return static_cast<uint16_t>(sign | 0x7C00);  // 65520 and more become infinity
    if (magnitude < 0x38800000u) {  // below 2^-14: adding 0.5 leaves the multiple of 2^-24 in the last bits
        float shifted;
        std::memcpy(&shifted, &magnitude, 4);
        shifted += 0.5f;
        std::memcpy(&bits, &shifted, 4);
        return static_cast<uint16_t>(sign | (bits - 0x3F000000u));
    }
    const uint32_t rounded = magnitude + 0xFFFu + (magnitude >> 13 & 1);
    return static_cast<uint16_t>(sign | ((rounded - 0x38000000u) >> 13));
}
