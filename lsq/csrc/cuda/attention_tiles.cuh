// Tiles of queries and keys of a head in shared memory, and their products on tensor cores.
//
// -DWIDTH: columns of a head, a multiple of 8 up to 128; -DTILE: queries or keys of a tile, a
// multiple of 16; -DCODED=1: queries, keys and values are codes, 0: Float; -DSHARING: heads of
// queries that share keys, default 1. A warp has 16 rows of a tile. Codes are exact in bfloat16;
// two bfloat16 for a float32 leave at most 2^-18, three 2^-27, which is exact enough for float32.
#pragma once

#include "rounding.cuh"
#include "tensor_core.cuh"

#ifndef SHARING
#define SHARING 1
#endif

namespace lsq {

// Rows of a fragment; each warp takes such a group of a tile's rows.
constexpr int kRows = 16, kGroups = TILE / kRows;
constexpr int kThreads = kGroups * kWarp;
constexpr int kColumns = (WIDTH + 15) / 16 * 16;  // of a head, with zeros behind it
// Number of bfloat16 for a float32 made here, for a Float, and for q, k or v.
constexpr bool kSingle = sizeof(Float) == 4;
constexpr int kParts = kSingle ? 3 : 2, kFloatParts = kSingle ? 3 : 1,
              kOperandParts = CODED ? 1 : kFloatParts;

static_assert(TILE % kRows == 0, "warps have whole fragments");

using Pairs = float[TILE / 8][4];     // what a lane holds of [16, TILE], queries by keys
using Sums = float[kColumns / 8][4];  // what a lane holds of [16, kColumns]

// A warp's first row in a tile; a lane's row of each half of them, and its first column of each
// eight.
LSQ_INLINE int warp_row() { return threadIdx.x / kWarp * kRows; }
LSQ_INLINE int lane() { return threadIdx.x % kWarp; }
LSQ_INLINE int lane_row(int half) { return warp_row() + lane() / 4 + 8 * half; }
LSQ_INLINE int lane_column(int eight) { return 8 * eight + lane() % 4 * 2; }

LSQ_INLINE float score_share(const Heads& heads) {
    return heads.softmax_scale != 0.0f ? heads.softmax_scale
                                       : static_cast<float>(1.0 / sqrt(static_cast<double>(WIDTH)));
}

// PARTS times TILE rows of COLUMNS elements, padded to 32 bytes. Eight neighbouring rows lie in
// different banks.
template <class Element, int COLUMNS, int PARTS>
struct alignas(16) SharedRows {
    static constexpr int kBytes = (COLUMNS * static_cast<int>(sizeof(Element)) + 31) / 32 * 32,
                         kStride = kBytes + 16;
    static constexpr int kSteps = kBytes / 32, kCount = PARTS;
    static constexpr int kVectors = kBytes / static_cast<int>(sizeof(Element)) / kVector;
    unsigned char bytes[PARTS][TILE * kStride];

    LSQ_INLINE unsigned char* at(int part, int row, int byte) {
        return bytes[part] + (row * kStride + byte);
    }
    LSQ_INLINE const unsigned char* at(int part, int row, int byte) const {
        return bytes[part] + (row * kStride + byte);
    }
};
using CodeTile = SharedRows<int8_t, WIDTH, 1>;
template <int PARTS>
using FloatTile = SharedRows<bfloat16, WIDTH, PARTS>;
using PairTile = SharedRows<bfloat16, TILE, kParts>;  // [queries, keys]

// q, k or v: codes, or floats.
struct Operand {
    const int8_t* codes;
    const Float* floats;
    int64_t columns, column;  // of the tensor, and where the first head begins
    float scale;

    LSQ_INLINE explicit Operand(const Projected& from)
        : codes(from.rows.coded.codes), floats(from.rows.floats), columns(from.columns),
          column(from.column), scale(1.0f) {
        if (codes) scale = static_cast<const float*>(from.rows.coded.scale)[0];
    }
};

// Splits `low` and `high` into pairs of bfloat16, each the nearest to the remainder.
template <int PARTS>
LSQ_INLINE void split(float low, float high, uint32_t (&pair)[PARTS]) {
#pragma unroll
    for (int part = 0; part < PARTS; ++part) {
        pair[part] = bfloat16_pair(low, high);
        low -= float_of(pair[part] << 16);
        high -= float_of(pair[part] & 0xFFFF0000u);
    }
}

// Calls work(row, column, element) for every vector of rows [first, first + count) of a head and of
// those that fill a fragment; element: index in the tensor, or -1.
template <class Tile, class Work>
LSQ_INLINE void for_vectors(const Operand& from, int64_t first, int count, int head,
                            const Work& work) {
    const int rows = (count + kRows - 1) / kRows * kRows, columns = static_cast<int>(from.columns);
    const int64_t begin = first * from.columns + from.column + head * WIDTH;
    for (int part = threadIdx.x; part < rows * Tile::kVectors; part += kThreads) {
        const int row = part / Tile::kVectors, column = part % Tile::kVectors * kVector;
        work(row, column, row < count && column < WIDTH ? begin + (row * columns + column) : -1);
    }
}

// Rows of a head to a tile, zeros beyond. All threads of the block must call this, and have left
// the tile; codes are still under way afterwards.
LSQ_INLINE void load_tile(const Operand& from, int64_t first, int count, int head, CodeTile& tile) {
    for_vectors<CodeTile>(from, first, count, head, [&](int row, int column, int64_t element) {
        copy_async<kVector>(tile.at(0, row, column), from.codes + (element < 0 ? 0 : element),
                            element >= 0);
    });
}

template <int PARTS>
LSQ_INLINE void load_tile(const Operand& from, int64_t first, int count, int head,
                          FloatTile<PARTS>& tile) {
    for_vectors<FloatTile<PARTS>>(
        from, first, count, head, [&](int row, int column, int64_t element) {
            float x[kVector] = {};
            if (element >= 0 && from.codes) {
                int32_t codes[kVector];
                load8(from.codes + element, codes);
#pragma unroll
                for (int i = 0; i < kVector; ++i) x[i] = static_cast<float>(codes[i]);
            } else if (element >= 0) {
                load8(from.floats + element, x);
            }
            uint32_t pairs[kVector / 2][PARTS];
#pragma unroll
            for (int i = 0; i < kVector / 2; ++i) split(x[2 * i], x[2 * i + 1], pairs[i]);
#pragma unroll
            for (int part = 0; part < PARTS; ++part) {
                store_words(
                    tile.at(part, row, 2 * column),
                    make_uint4(pairs[0][part], pairs[1][part], pairs[2][part], pairs[3][part]));
            }
        });
}

// products [16, TILE] = the warp's rows of `mine` times the first `count` rows of `theirs`, in
// whole fragments; 0 beyond.
template <class Mine, class Theirs, class T>
LSQ_INLINE void multiply_rows(const Mine& mine, const Theirs& theirs, int count,
                              T (&products)[TILE / 8][4]) {
    // More of a wide head's would take too many registers.
    [[maybe_unused]] constexpr int kAtOnce = Mine::kSteps > 4 ? 4 : Mine::kSteps;
    constexpr int kMost = Mine::kCount > Theirs::kCount ? Mine::kCount : Theirs::kCount;
#pragma unroll
    for (int eight = 0; eight < TILE / 8; ++eight) {
#pragma unroll
        for (int i = 0; i < 4; ++i) products[eight][i] = 0;
    }
#pragma unroll kAtOnce
    for (int step = 0; step < Mine::kSteps; ++step) {
        uint32_t left[Mine::kCount][4];
#pragma unroll
        for (int part = 0; part < Mine::kCount; ++part) {
            load_matrices(mine.at(part, warp_row() + lane() % 16, 32 * step + lane() / 16 * 16),
                          left[part]);
        }
#pragma unroll
        for (int group = 0; group < kGroups; ++group) {
            if (kRows * group >= count) continue;
#pragma unroll
            for (int part = 0; part < Theirs::kCount; ++part) {
                uint32_t words[4];
                const int row = kRows * group + lane() % 8 + lane() / 16 * 8;
                load_matrices(theirs.at(part, row, 32 * step + lane() / 8 % 2 * 16), words);
                const uint32_t right[2][2] = {{words[0], words[1]}, {words[2], words[3]}};
#pragma unroll
                for (int other = 0; other < Mine::kCount && other + part < kMost; ++other) {
                    multiply(products[2 * group], left[other], right[0]);
                    multiply(products[2 * group + 1], left[other], right[1]);
                }
            }
        }
    }
}

// sums [16, 16 * STEPS] += a left factor [16, TILE] times columns from 16 * first on of the first
// `count` rows of a tile, in whole fragments. left(group, words): makes the factor's fragments of
// 16 columns.
template <int EIGHTS, class Left, class Tile>
LSQ_INLINE void add_products(const Left& left, const Tile& tile, int count, int first,
                             float (&sums)[EIGHTS][4]) {
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
        if (kRows * group >= count) continue;
        uint32_t factors[kParts][4];
        left(group, factors);
#pragma unroll
        for (int step = 0; step < EIGHTS / 2; ++step) {
#pragma unroll
            for (int part = 0; part < Tile::kCount; ++part) {
                uint32_t words[4];
                const int byte = 32 * (first + step) + lane() / 16 * 16;
                load_matrices<4, true>(tile.at(part, kRows * group + lane() % 16, byte), words);
                const uint32_t right[2][2] = {{words[0], words[1]}, {words[2], words[3]}};
#pragma unroll
                for (int other = 0; other + part < kParts; ++other) {
                    multiply(sums[2 * step], factors[other], right[0]);
                    multiply(sums[2 * step + 1], factors[other], right[1]);
                }
            }
        }
    }
}

// Left factor of add_products: the warp's rows of pairs in registers.
struct OfRows {
    const Pairs& pairs;

    LSQ_INLINE void operator()(int group, uint32_t (&words)[kParts][4]) const {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            uint32_t parts[kParts];
            const float* two = pairs[2 * group + i / 2] + i % 2 * 2;
            split(two[0], two[1], parts);
#pragma unroll
            for (int part = 0; part < kParts; ++part) words[part][i] = parts[part];
        }
    }
};

// Left factor of add_products: pairs in shared memory, transposed, so that the warp's rows are
// keys.
struct OfColumns {
    const PairTile& pairs;

    LSQ_INLINE void operator()(int group, uint32_t (&words)[kParts][4]) const {
        const int query = kRows * group + lane() % 8 + lane() / 16 * 8,
                  key = warp_row() + lane() / 8 % 2 * 8;
#pragma unroll
        for (int part = 0; part < kParts; ++part)
            load_matrices<4, true>(pairs.at(part, query, 2 * key), words[part]);
    }
};

// A lane's four of eight keys' pairs to shared memory.
LSQ_INLINE void store_pairs(const float (&four)[4], int eight, PairTile& pairs) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        uint32_t parts[kParts];
        split(four[2 * half], four[2 * half + 1], parts);
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
            store_words(pairs.at(part, lane_row(half), 2 * lane_column(eight)), parts[part]);
        }
    }
}

}  // namespace lsq
