// Int8 products by tiles: what the units of a processor multiply at once, and how operands are
// packed for them.
//
// Sums int32 [M, N] of a int8 [M, K] times b int8 [N, K] transposed. A tile of `a` has 16 rows of
// 64 inner elements, a tile of `b` has 16 columns of the result for 64 inner elements, four of
// which lie together: [64 / 4][16][4]. Tiles that follow each other along K lie behind each other;
// what lies beyond the edges is zero. Sums are exact.
#pragma once

#include <cstdint>
#include <memory>
#include <new>
#include <optional>

#include "amx.h"

namespace lsq {

constexpr int64_t kTileSide = 16, kTileInner = 64, kTileBytes = kTileSide * kTileInner;
constexpr int64_t kTilePair = 2 * kTileSide;  // rows, and columns, that a kernel takes at a time
constexpr int64_t kTileUnits = kTileInner / 4;  // of four inner elements, which lie together

// What multiplies; the numbers are those of lsq/native/tiles.py.
enum class Instructions : int64_t { plain = 0, avx_vnni = 1, avx512_vnni = 2, amx = 3 };

// Whether this processor has them, and the system lets them be used.
bool usable(Instructions instructions);

// Element (row, inner) of a matrix of codes stands at data[row * stride + inner], or at data[inner
// * stride + row].
struct Codes {
    const int8_t* data;
    int64_t stride, transposed;
};

// A product, as Python hands it over. Its struct is lsq.native.tiles.TileProduct.
struct TileProduct {
    Codes a, b;
    int64_t rows, columns, inner;
    Instructions instructions;
    // Rows of sums that a thread makes at a time, a multiple of kTilePair; 0: as many as fit its
    // cache.
    int64_t strip;
    int8_t* memory;   // for b as it is packed: packed_bytes(columns, inner), aligned to 64 bytes
};

inline int64_t rounded_up(int64_t number, int64_t unit) {
    return (number + unit - 1) / unit * unit;
}
inline int64_t inner_tiles(int64_t inner) { return (inner + kTileInner - 1) / kTileInner; }

// Of columns that are whole pairs of tiles, and behind them 128 times the sum of each column
// (int32).
inline int64_t packed_bytes(int64_t columns, int64_t inner) {
    return rounded_up(columns, kTilePair) * (inner_tiles(inner) * kTileInner + 4);
}

// Tiles of a: rows `stride` bytes apart, tiles along K `step`, and the next 16 rows `block` bytes.
struct TileRows {
    const int8_t* data;
    int64_t stride, step, block;
};

// Columns of b are packed in groups, each for all of K.
int64_t groups_of_columns(const TileProduct& product);
void pack_columns(const TileProduct& product, int64_t group);

// 128 times the sum of each column, behind all tiles of b; those of one tile are added.
int32_t* column_sums(const TileProduct& product);
void add_column_sums(const int8_t* tile, int32_t* sums);

// Memory that is aligned to 64 bytes, grows, and is not cleared; a thread keeps its own from
// product to product, because fresh memory costs the system's clearing of its pages.
template <class T>
class Kept {
public:
    T* at_least(int64_t count) {
        if (count > count_) {
            data_.reset();
            data_.reset(static_cast<T*>(::operator new[](count * sizeof(T), std::align_val_t{64})));
            count_ = count;
        }
        return data_.get();
    }

private:
    struct Free {
        void operator()(T* data) const { ::operator delete[](data, std::align_val_t{64}); }
    };
    std::unique_ptr<T, Free> data_;
    int64_t count_ = 0;
};

// Rows of a product on one thread, once all of b is packed.
class StripMultiplier {
public:
    explicit StripMultiplier(const TileProduct& product);
    StripMultiplier(const StripMultiplier&) = delete;
    StripMultiplier& operator=(const StripMultiplier&) = delete;

    // Takes rows [first, first + count) of a.
    void take(int64_t first, int64_t count);

    // Rows that there must be room for: those beyond the last one may be made as well.
    int64_t height() const { return height_; }

    // Sums of the rows that were taken, columns [begin, end) in whole pairs of tiles, rows `stride`
    // apart.
    void multiply(int64_t begin, int64_t end, int32_t* sums, int64_t stride) const;

    // All sums of the rows that were taken, stride() apart; they hold until the next call on this
    // thread.
    const int32_t* sums() const;
    int64_t stride() const;

private:
    const TileProduct& product_;
    TileRows a_;
    int64_t rows_, height_;
#if defined(LSQ_AMX)
    std::optional<WholeTiles> tiles_;
#endif
};

// Rows that a thread takes at a time: few enough for its cache, and for all threads to have some.
int64_t strip_rows(const TileProduct& product, int threads);

}  // namespace lsq
