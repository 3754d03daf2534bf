// b of an int8 product as packed fields, in the order of b's fragments (CUDA of
// lsq/quant/layouts.py): copied as they are and unpacked in registers.
//
// -DFIELD_BITS is the width of a code, 1 to 7, in two's complement. Its fields become the highest
// bits of a byte, which is the code times 2^(8 - FIELD_BITS) with its sign: there is no zero to
// take off, and sums are shifted once. Of 1 bit, a byte is 64 or -64 for a code of 1 or -1.
#pragma once

#include "product_mma.cuh"

namespace lsq {

// (word & mask) | others by one instruction; of two constants the compiler makes two.
LSQ_INLINE uint32_t masked_or(uint32_t word, uint32_t mask, uint32_t others) {
#ifdef LSQ_EMULATOR
    return (word & mask) | others;
#else
    uint32_t found;
    asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(found) : "r"(word), "r"(mask), "r"(others));
    return found;
#endif
}

struct FieldColumns {
    static constexpr int kRows = 8, kUnits = FIELD_BITS % 2 ? 8 : 4;  // of a span
    static constexpr int kSpan = kUnits * kCudaLayout.unit;           // inputs
    static constexpr int kTileBytes = kRows * kColumnBytes;           // of eight rows in a step
    static constexpr int kWarps = kProductThreads / kWarp;
    static constexpr int kShift = FIELD_BITS == 1 ? 6 : 8 - FIELD_BITS;  // of a code in its byte
    static_assert(kCudaLayout.unit == kChunk && kCudaLayout.outputs == kRows &&
                      kCudaLayout.vector == 4 * kWarp && kStep % kSpan == 0,
                  "a unit is a word of b's fragments");
    static_assert(FIELD_BITS >= 1 && FIELD_BITS <= 7, "wider codes are int8");

    const int8_t* from;
    int stored;  // bytes of eight rows
    int left;    // tiles of eight rows from the warp's first one to the last of all

    LSQ_INLINE FieldColumns(const int8_t* weight, int64_t first, int64_t rows, int64_t inner)
        : stored(static_cast<int>(inner + kSpan - 1) / kSpan * (kSpan * FIELD_BITS)),
          left(static_cast<int>(min(rows - first, static_cast<int64_t>(TILE_N))) / kRows - warp()) {
        from = weight + (first / kRows + warp()) * stored;
    }

    LSQ_INLINE static int warp() { return threadIdx.x / kWarp; }

    // Begins to copy step `step`, with zeros beyond the operand; a has zeros there.
    LSQ_INLINE void begin(unsigned char* tile, int64_t step) const {
#pragma unroll
        for (int i = 0; i < TILE_N / kRows; i += kWarps) {
#pragma unroll
            for (int first = 0; first < kTileBytes; first += kWarp * kChunk) {
                const int at = first + threadIdx.x % kWarp * kChunk;
                if (at >= kTileBytes) break;
                const int offset = static_cast<int>(step) * kTileBytes + at;
                copy_async<kChunk>(tile + (i + warp()) * kTileBytes + at,
                                   from + i * stored + offset, i < left && offset < stored);
            }
        }
    }

    LSQ_INLINE void load(const unsigned char* stage, int64_t, int chunk, ColumnFragments& b) const {
        const unsigned char* tiles = stage + TILE_M * kStep + warp_column() * kColumnBytes;
        const unsigned char* words = tiles + threadIdx.x % kWarp * 4;
#pragma unroll
        for (int j = 0; j < kColumnTiles; ++j) {
#pragma unroll
            for (int half = 0; half < 2; ++half)
                b[j][half] = codes(words + j * kTileBytes, chunk + half);
        }
    }

    // The bytes of the lane's four codes of a unit.
    LSQ_INLINE static uint32_t codes(const unsigned char* words, int unit) {
        const int of_span = unit % kUnits;
        int vector = unit / kUnits * kUnits * FIELD_BITS / 8, low = 8 - FIELD_BITS;
        uint32_t found = FIELD_BITS == 1 ? 0x40404040u : 0;
#pragma unroll
        for (int width = 4; width > 0; width /= 2) {
            if (!(FIELD_BITS & width)) continue;
            const int places = 8 / width, shift = low - of_span % places * width;
            const uint32_t word = load_words<uint32_t>(
                words + (vector + of_span / places) * kCudaLayout.vector);
            found = masked_or(shift < 0 ? word >> -shift : word << shift,
                              ((1u << width) - 1) * 0x01010101u << low, found);
            vector += kUnits / places, low += width;
        }
        return found;
    }

    // Makes sums of codes of sums of bytes.
    LSQ_INLINE static void finish(Sums& sums) {
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
            for (int j = 0; j < kColumnTiles; ++j) {
#pragma unroll
                for (int at = 0; at < 4; ++at) sums.of[i][j][at] >>= kShift;
            }
        }
    }
};

}  // namespace lsq
