// Int8 products by tiles, and how operands are packed.
//
// Sums int32 [M, N] of a int8 [M, K] times b int8 [N, K] transposed, exactly. A tile of `a` has 16
// rows of 64 inner elements, a tile of `b` 16 columns of the result for 64 inner elements, four of
// which lie together: [64 / 4][16][4]. Tiles follow each other along K; elements beyond the edges
// are zero.
#pragma once

#include <cstdint>
#include <optional>
#include <type_traits>

#include "aligned.h"
#include "amx.h"

namespace lsq {

constexpr int64_t kTileSide = 16, kTileInner = 64, kTileBytes = kTileSide * kTileInner;
constexpr int64_t kTilePair = 2 * kTileSide;    // rows, and columns, that a kernel takes at a time
constexpr int64_t kTileUnits = kTileInner / 4;  // of four inner elements, which lie together

// Instructions that multiply; numbers as in lsq/native/tiles.py.
enum class Instructions : int64_t { plain = 0, avx_vnni = 1, avx512_vnni = 2, amx = 3 };

// Whether this processor has them, and the system lets them be used.
bool usable(Instructions instructions);

// Element (row, inner) lies at data[row * stride + inner], or at data[inner * stride + row].
struct Codes {
    const int8_t* data;
    int64_t stride, transposed;
};

// lsq.native.tiles.TileProduct.
struct TileProduct {
    Codes a, b;
    int64_t rows, columns, inner;
    Instructions instructions;
    // Rows of sums that a thread makes at a time, a multiple of kTilePair; 0: by a rule.
    int64_t strip;
    int8_t* memory;  // for b as it is packed: packed_bytes(columns, inner), aligned to 64 bytes
};

inline int64_t rounded_up(int64_t number, int64_t unit) {
    return (number + unit - 1) / unit * unit;
}
inline int64_t inner_tiles(int64_t inner) { return (inner + kTileInner - 1) / kTileInner; }

// Bytes of whole pairs of tiles and, behind them, 128 times the sum of each column (int32).
inline int64_t packed_bytes(int64_t columns, int64_t inner) {
    return rounded_up(columns, kTilePair) * (inner_tiles(inner) * kTileInner + 4);
}

// Tiles of a: rows `stride` bytes apart, tiles along K `step`, and the next 16 rows `block` bytes.
struct TileRows {
    const int8_t* data;
    int64_t stride, step, block;
};

// Rows of `codes` from `first` on, as they lie.
inline TileRows rows_of(const Codes& codes, int64_t first) {
    return {codes.data + first * codes.stride, codes.stride, kTileInner, kTileSide * codes.stride};
}

// Columns of b are packed in groups, each for all of K; on all threads by pack_columns(product).
int64_t groups_of_columns(const TileProduct& product);
void pack_columns(const TileProduct& product, int64_t group);
void pack_columns(const TileProduct& product);

// 128 times the sum of each column, behind all tiles of b; add_column_sums adds those of one tile.
int32_t* column_sums(const TileProduct& product);
void add_column_sums(const int8_t* tile, int32_t* sums);

// The registers of AMX, while a thread multiplies by these instructions.
class TileSession {
public:
    explicit TileSession([[maybe_unused]] Instructions instructions) {
#if defined(LSQ_AMX)
        if (instructions == Instructions::amx) tiles_.emplace();
#endif
    }

private:
#if defined(LSQ_AMX)
    std::optional<WholeTiles> tiles_;
#endif
};

// The sums of columns behind the blocks [columns / 32, inner / 64] of a packed weight.
template <class Block>
auto* sums_behind(Block* blocks, int64_t columns, int64_t inner) {
    using Sum = std::conditional_t<std::is_const_v<Block>, const int32_t, int32_t>;
    return reinterpret_cast<Sum*>(blocks +
                                  rounded_up(columns, kTilePair) / kTilePair * inner_tiles(inner));
}

// Multiplies rows on one thread, once b is packed.
class StripMultiplier {
public:
    explicit StripMultiplier(const TileProduct& product);
    StripMultiplier(const StripMultiplier&) = delete;
    StripMultiplier& operator=(const StripMultiplier&) = delete;

    // Takes rows [first, first + count) of a.
    void take(int64_t first, int64_t count);

    // Rows of sums to make room for.
    int64_t height() const { return height_; }

    // Sums of the taken rows, columns [begin, end) in whole pairs of tiles, rows `stride` apart.
    void multiply(int64_t begin, int64_t end, int32_t* sums, int64_t stride) const;

    // All sums of the taken rows, stride() apart, valid until the next call on this thread.
    const int32_t* sums() const;
    int64_t stride() const;

private:
    const TileProduct& product_;
    TileRows a_;
    int64_t rows_, height_;
    TileSession session_;
};

// Rows that a thread takes at a time: few enough for its cache, and for all threads to have some.
int64_t strip_rows(const TileProduct& product, int threads);

}  // namespace lsq
