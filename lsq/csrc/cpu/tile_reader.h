// Packs operands of int8 products into tiles, from either layout.
#pragma once

#include <algorithm>
#include <cstring>

#include "lanes.h"
#include "tiles.h"

namespace lsq {

constexpr int64_t kTileGroup = 64;  // rows or columns that are packed together

// 64 rows of 64 inner elements, as units of four, in either order.
struct alignas(64) UnitBlock {
    uint32_t units[kTileGroup * kTileUnits];

    int8_t* bytes() { return reinterpret_cast<int8_t*>(units); }
};

// Units [16][16], rows `stride` bytes apart, become a tile, transposed.
inline void transpose_units(const int8_t* from, int64_t stride, int8_t* tile) {
    for (int64_t row = 0; row < kTileSide; row += kLanes) {
        for (int64_t column = 0; column < kTileUnits; column += kLanes) {
            Lanes lines[kLanes];
            const int8_t* read = from + row * stride + 4 * column;
            int8_t* to = tile + column * kTileInner + 4 * row;
            for (int64_t i = 0; i < kLanes; ++i)
                std::memcpy(&lines[i], read + i * stride, sizeof(Lanes));
            transpose(lines);
            for (int64_t i = 0; i < kLanes; ++i)
                std::memcpy(to + i * kTileInner, &lines[i], sizeof(Lanes));
        }
    }
}

// Reads 64 columns of a transposed matrix for 64 inner elements, fewer at its edges, as units
// [16][64].
inline void read_units(const Codes& codes, int64_t first, int64_t rows, int64_t inner,
                       int64_t count, UnitBlock& block) {
    alignas(64) int8_t lines[4][kTileGroup] = {};
    for (int64_t unit = 0; unit < kTileUnits; ++unit) {
        const int8_t* four[4];
        for (int64_t i = 0; i < 4; ++i) {
            four[i] = codes.data + (inner + 4 * unit + i) * codes.stride + first;
            if (rows == kTileGroup && count == kTileInner) continue;
            std::fill(lines[i], lines[i] + kTileGroup, 0);
            if (4 * unit + i < count) std::copy(four[i], four[i] + rows, lines[i]);
            four[i] = lines[i];
        }
        const int8_t *one = four[0], *two = four[1], *three = four[2], *last = four[3];
        int8_t* to = reinterpret_cast<int8_t*>(block.units + unit * kTileGroup);
#pragma omp simd
        for (int64_t row = 0; row < kTileGroup; ++row) {
            to[4 * row] = one[row];
            to[4 * row + 1] = two[row];
            to[4 * row + 2] = three[row];
            to[4 * row + 3] = last[row];
        }
    }
}

// Tiles of rows [first, first + rows) of `codes` for all of K: `to` for the first 16, `distance`
// bytes for the next; done(number, tile) for each, to the end of the last pair. 64 rows by 64 inner
// elements are read together: a cache line of a transposed matrix, whose rows may lie pages apart.
class TileReader {
public:
    TileReader(const Codes& codes, int64_t inner) : codes_(codes), inner_(inner) {}

    // Tiles of 16 rows of 64 bytes.
    template <class Done>
    void rows(int64_t first, int64_t rows, int8_t* to, int64_t distance, const Done& done) {
        each(first, rows, to, distance, done,
             [&](const Position& at, int64_t number, int8_t* tile) {
                 if (codes_.transposed) {
                     transpose_units(block_.bytes() + number * kTileInner, 4 * kTileGroup, tile);
                 } else {
                     read_rows(at, number, tile);
                 }
             });
    }

    // Tiles of units [16][16].
    template <class Done>
    void units(int64_t first, int64_t rows, int8_t* to, int64_t distance, const Done& done) {
        each(first, rows, to, distance, done,
             [&](const Position& at, int64_t number, int8_t* tile) {
                 if (codes_.transposed) {
                     for (int64_t unit = 0; unit < kTileUnits; ++unit) {
                         const uint32_t* from =
                             block_.units + unit * kTileGroup + number * kTileSide;
                         std::memcpy(tile + unit * kTileInner, from, kTileInner);
                     }
                 } else if (number * kTileSide + kTileSide <= at.rows && at.count == kTileInner) {
                     transpose_units(line(at, number * kTileSide), codes_.stride, tile);
                 } else {
                     read_rows(at, number, block_.bytes());
                     transpose_units(block_.bytes(), kTileInner, tile);
                 }
             });
    }

private:
    struct Position {
        int64_t first, rows, inner, count;  // of a block that may be cut at the edges
    };

    // Calls make(position, number, tile) for each tile; of a transposed matrix, `block_` holds the
    // units.
    template <class Done, class Make>
    void each(int64_t first, int64_t rows, int8_t* to, int64_t distance, const Done& done,
              const Make& make) {
        const int64_t height = rounded_up(rows, kTilePair);
        for (int64_t inner = 0; inner < inner_; inner += kTileInner, to += kTileBytes) {
            const int64_t count = std::min(kTileInner, inner_ - inner);
            for (int64_t row = 0; row < height; row += kTileGroup) {
                const Position at{first + row, std::min(kTileGroup, rows - row), inner, count};
                if (codes_.transposed)
                    read_units(codes_, at.first, at.rows, at.inner, at.count, block_);
                for (int64_t i = 0; i < std::min(kTileGroup, height - row) / kTileSide; ++i) {
                    const int64_t number = row / kTileSide + i;
                    int8_t* tile = to + number * distance;
                    make(at, i, tile);
                    done(number, tile);
                }
            }
        }
    }

    const int8_t* line(const Position& at, int64_t row) const {
        return codes_.data + (at.first + row) * codes_.stride + at.inner;
    }

    void read_rows(const Position& at, int64_t number, int8_t* tile) const {
        const int64_t first = number * kTileSide,
                      rows = std::clamp<int64_t>(at.rows - first, 0, kTileSide);
        if (rows < kTileSide || at.count < kTileInner) std::memset(tile, 0, kTileBytes);
        for (int64_t row = 0; row < rows; ++row) {
            std::memcpy(tile + row * kTileInner, line(at, first + row), at.count);
        }
    }

    const Codes& codes_;
    int64_t inner_;
    UnitBlock block_;
};

// Tiles of rows [first, first + count) of `codes` for all of K, with 128 added to each code if
// `is_biased`; they lie in `memory`.
inline TileRows packed_rows(const Codes& codes, int64_t inner, int64_t first, int64_t count,
                            bool is_biased, Kept<int8_t>& memory) {
    const int64_t depth = inner_tiles(inner);
    int8_t* tiles = memory.at_least(rounded_up(count, kTilePair) * depth * kTileInner);
    const TileRows packed{tiles, kTileInner, kTileBytes, depth * kTileBytes};
    TileReader(codes, inner).rows(first, count, tiles, packed.block, [&](int64_t, int8_t* tile) {
        if (!is_biased) return;
#pragma omp simd
        for (int64_t i = 0; i < kTileBytes; ++i) tile[i] = static_cast<int8_t>(tile[i] ^ 0x80);
    });
    return packed;
}

}  // namespace lsq
