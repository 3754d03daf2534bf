// b of an int8 product in the format Int4: groups of 32 values along K in 17 bytes, copied as they
// are and unpacked in registers: a lane's word of pairs is its two words of 32 values.
//
// A row's two groups of a step begin anywhere, so that up to three bytes before them are copied,
// too. P rows, a multiple of 16, keep words inside the weight.
#pragma once

#include "int4.cuh"
#include "product_mma.cuh"

namespace lsq {

struct Int4Columns {
    static constexpr int kBytes = kStep / kInt4Group * sizeof(Int4Group);  // of a row in a step
    // Threads that copy a row.
    static constexpr int kLanes = kProductThreads / TILE_N;
    static constexpr int kWords = (kBytes + 3 + 3) / 4, kEach = (kWords + kLanes - 1) / kLanes;
    // From row to row: what lanes read together lies in different banks.
    static constexpr int kRowBytes = 48;
    static_assert(kLanes * TILE_N == kProductThreads && kLanes * kEach * 4 <= kRowBytes &&
                      kRowBytes <= kStep,
                  "fits");

    const int8_t* from;
    int64_t stored;  // bytes of a row
    int left;        // rows from the first one to the last of all

    LSQ_INLINE Int4Columns(const int8_t* weight, int64_t first, int64_t rows, int64_t inner)
        : from(weight),
          stored((inner + kInt4Group - 1) / kInt4Group * static_cast<int64_t>(sizeof(Int4Group))),
          left(static_cast<int>(min(rows - first, static_cast<int64_t>(TILE_N)))) {
        from += first * stored;
    }

    LSQ_INLINE const int8_t* begin_of(int row, int64_t step) const {
        return from + (row * stored + step * kBytes);
    }
    LSQ_INLINE static int skipped(const int8_t* begin) {
        return static_cast<int>(reinterpret_cast<uint64_t>(begin) % 4);
    }

    // Begins to copy step `step`. Bytes beyond a row are the next one's, or zeros; a has zeros
    // there.
    LSQ_INLINE void begin(unsigned char* tile, int64_t step) const {
        const int row = threadIdx.x / kLanes;
        const int8_t* begin = begin_of(row, step);
        const int8_t* word = begin - skipped(begin) + threadIdx.x % kLanes * kEach * 4;
        unsigned char* to = tile + row * kRowBytes + threadIdx.x % kLanes * kEach * 4;
#pragma unroll
        for (int i = 0; i < kEach; ++i) {
            copy_async<4>(to + 4 * i, word + 4 * i,
                          row < left && word + 4 * i < from + (row + 1) * stored);
        }
    }

    LSQ_INLINE void load(const unsigned char* stage, int64_t step, int chunk,
                         ColumnFragments& b) const {
        const int lane = threadIdx.x % kWarp,
                  group = chunk / 2 * static_cast<int>(sizeof(Int4Group));
#pragma unroll
        for (int j = 0; j < kColumnTiles; ++j) {
            const int row = warp_column() + 8 * j + lane / 4;
            const unsigned char* words = stage + TILE_M * kStep + row * kRowBytes;
            const int first = skipped(begin_of(row, step)) + group, at = first + 1 + lane % 4 * 4;
            const Multiplier multiplier(load_words<uint32_t>(words + first / 4 * 4) >>
                                        first % 4 * 8);
            const uint64_t low = load_words<uint32_t>(words + at / 4 * 4);
            const uint64_t high = load_words<uint32_t>(words + at / 4 * 4 + 4);
            const uint32_t pairs = static_cast<uint32_t>((high << 32 | low) >> at % 4 * 8);
            b[j][0] = multiplier.times(pairs), b[j][1] = multiplier.times(pairs >> 4);
        }
    }
};

}  // namespace lsq
