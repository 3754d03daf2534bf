// Unpacks groups of weights of 4 bits: 17 bytes anywhere, codes are whole multipliers times 4 bits
// (include/int4.h).
#pragma once

#include "vectors.cuh"

#include "int4.h"

namespace lsq {

// a - b, byte by byte, modulo 256.
LSQ_INLINE uint32_t subtract_bytes(uint32_t a, uint32_t b) {
    constexpr uint32_t kTop = 0x80808080u;
    return ((a | kTop) - (b & ~kTop)) ^ ((a ^ ~b) & kTop);
}

struct Multiplier {
    uint32_t magnitude, eights;  // the latter eight times, in each byte
    bool negative;

    LSQ_INLINE explicit Multiplier(uint32_t byte) {
        const int32_t value = static_cast<int8_t>(byte);
        negative = value < 0;
        magnitude = negative ? -value : value;
        eights = 8u * magnitude * 0x01010101u;
    }

    // Four 4-bit codes, in the low halves of bytes -> four of int8.
    LSQ_INLINE uint32_t times(uint32_t halves) const {
        // 8 more each, at most 15 * 15.
        const uint32_t raised = (halves & 0x0F0F0F0Fu ^ 0x08080808u) * magnitude;
        return negative ? subtract_bytes(eights, raised) : subtract_bytes(raised, eights);
    }
};

// A stored group as the words of memory that hold it.
struct StoredGroup {
    uint32_t words[5];
    int skipped;  // bytes of the first word

    LSQ_INLINE explicit StoredGroup(const int8_t* from)
        : skipped(static_cast<int>(reinterpret_cast<uint64_t>(from) % 4)) {
#pragma unroll
        for (int i = 0; i < 5; ++i) words[i] = load_words<uint32_t>(from - skipped + 4 * i);
    }

    LSQ_INLINE Multiplier multiplier() const { return Multiplier(words[0] >> 8 * skipped); }

    // Pairs [4 * i, 4 * i + 4).
    LSQ_INLINE uint32_t pairs(int i) const {
        const uint64_t both = static_cast<uint64_t>(words[i + 1]) << 32 | words[i];
        return static_cast<uint32_t>(both >> 8 * (skipped + 1));
    }
};

}  // namespace lsq
