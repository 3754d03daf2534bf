// bfloat16 as its bits: what the conversion instruction of a GPU does. Rounds to nearest even.
#pragma once

#include <cstdint>
#include <cstring>

inline uint16_t emulator_float_to_bfloat16(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    if (x != x) return 0x7FFF;
    return static_cast<uint16_t>((bits + 0x7FFFu + (bits >> 16 & 1)) >> 16);
}
