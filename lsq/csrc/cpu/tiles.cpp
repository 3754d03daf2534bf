// Loops over the tiles of int8 products; tile_reader.h packs and tile_kernels.cpp multiplies them.
#include "tiles.h"

#include <algorithm>
#include <cstring>

#include "rows.h"
#include "tile_kernels.h"
#include "tile_reader.h"

namespace lsq {

namespace {

// Inner tiles of a pair of rows, which stay in the first cache.
constexpr int64_t kDepth = 8;
// From so many inner tiles on, rows of a and b are far apart.
constexpr int64_t kLong = 64;
constexpr int64_t kWidth = 512;  // columns whose tiles and sums stay in the second cache
// Up to so many bytes, b stays in the second cache for all strips.
constexpr int64_t kCachedBytes = 1 << 20;
// Up to so many rows, fetching b ahead pays.
constexpr int64_t kFewRows = 512;
// From so many bytes of a on, a transposed matrix is read in long strips.
constexpr int64_t kFarBytes = 32 << 20;
constexpr int64_t kShortStrip = 64, kLongStrip = 256;
constexpr int64_t kColumns = 256;  // of a block of sums that a thread makes at a time

// Packs a pair of rows for `depth` tiles along K; flips bits of `flipped`.
TileRows packed_pair(const TileRows& from, int64_t depth, int8_t flipped, int8_t* to) {
    for (int64_t row = 0; row < kTilePair; ++row) {
        const int8_t* line =
            from.data + row / kTileSide * from.block + row % kTileSide * from.stride;
        int8_t* first = to + (row / kTileSide * depth * kTileSide + row % kTileSide) * kTileInner;
        for (int64_t k = 0; k < depth; ++k) {
#pragma omp simd
            for (int64_t i = 0; i < kTileInner; ++i)
                first[k * kTileBytes + i] = line[k * kTileInner + i] ^ flipped;
        }
    }
    return {to, kTileInner, kTileBytes, depth * kTileBytes};
}

// Part `part` of `parts` of the tiles of a pair of columns that follow along K, into the second
// cache.
void prefetch_next(const int8_t* b, int64_t depth, int64_t part, int64_t parts) {
    const int64_t lines = 2 * kDepth * kTileSide;
    for (int64_t line = part * lines / parts; line < (part + 1) * lines / parts; ++line) {
        const int64_t tile = line / kTileSide,
                      next = tile / kDepth * depth + kDepth + tile % kDepth;
        __builtin_prefetch(b + next * kTileBytes + line % kTileSide * kTileInner, 0, 2);
    }
}

// A thread's packed strip of a, and its sums.
struct Strip {
    Kept<int8_t> a;
    Kept<int32_t> sums;
};

Strip& kept() {
    static thread_local Strip strip;
    return strip;
}

}  // namespace

int64_t groups_of_columns(const TileProduct& product) {
    return (product.columns + kTileGroup - 1) / kTileGroup;
}

int32_t* column_sums(const TileProduct& product) {
    const int64_t columns = rounded_up(product.columns, kTilePair);
    return reinterpret_cast<int32_t*>(product.memory +
                                      columns * inner_tiles(product.inner) * kTileInner);
}

void add_column_sums(const int8_t* tile, int32_t* sums) {
    for (int64_t unit = 0; unit < kTileUnits; ++unit) {
        const int8_t* from = tile + unit * kTileInner;
#pragma omp simd
        for (int64_t i = 0; i < kTileSide; ++i) {
            sums[i] += 128 * (from[4 * i] + from[4 * i + 1] + from[4 * i + 2] + from[4 * i + 3]);
        }
    }
}

void pack_columns(const TileProduct& product, int64_t group) {
    const int64_t first = group * kTileGroup, rows = std::min(kTileGroup, product.columns - first);
    const int64_t blocks = rounded_up(rows, kTilePair) / kTileSide,
                  block = inner_tiles(product.inner) * kTileBytes;
    int32_t* sums = column_sums(product) + first;
    std::fill(sums, sums + blocks * kTileSide, 0);
    const bool wanted = biased(product.instructions);
    int8_t* to = product.memory + first / kTileSide * block;
    TileReader(product.b, product.inner)
        .units(first, rows, to, block, [&](int64_t i, const int8_t* tile) {
            if (wanted) add_column_sums(tile, sums + i * kTileSide);
        });
}

void pack_columns(const TileProduct& product) {
#pragma omp parallel for schedule(static)
    for (int64_t group = 0; group < groups_of_columns(product); ++group)
        pack_columns(product, group);
}

StripMultiplier::StripMultiplier(const TileProduct& product)
    : product_(product), a_{}, rows_(0), height_(0), session_(product.instructions) {}

// One line more than the sums: rows a power of two apart share too few cache sets.
int64_t StripMultiplier::stride() const {
    return rounded_up(product_.columns, kTilePair) + kTileSide;
}

void StripMultiplier::take(int64_t first, int64_t count) {
    const Codes& codes = product_.a;
    const int64_t depth = inner_tiles(product_.inner);
    const bool is_biased = biased(product_.instructions);
    rows_ = count;
    height_ = rounded_up(count, kTilePair);
    const bool whole = !codes.transposed && count == height_ && product_.inner % kTileInner == 0;
    a_ = whole && (!is_biased || depth > kLong)
             ? rows_of(codes, first)
             : packed_rows(codes, product_.inner, first, count, is_biased, kept().a);
}

void StripMultiplier::multiply(int64_t begin, int64_t end, int32_t* sums, int64_t stride) const {
    const Kernel kernel = kernel_of(product_.instructions);
    const int64_t depth = inner_tiles(product_.inner);
    const bool is_long = depth > kLong;
    // Few rows read b once, in its order.
    const bool in_order =
        height_ == kTilePair && (rows_ <= kTileSide || depth <= 2 * kDepth) && !is_long;
    const bool fetches = product_.rows <= kFewRows && !is_long;
    const int64_t step = in_order ? depth : kDepth;
    const int8_t flipped = biased(product_.instructions) ? -128 : 0;
    alignas(64) int8_t pair_of_rows[2 * kDepth * kTileBytes];
    for (int64_t first = begin; first < end; first += kWidth) {
        const int64_t past = std::min(first + kWidth, end);
        for (int64_t k = 0; k < depth; k += step) {
            const int64_t deep = std::min(step, depth - k);
            for (int64_t row = 0; row < height_; row += kTilePair) {
                TileRows a{a_.data + k * a_.step + row / kTileSide * a_.block, a_.stride, a_.step,
                           a_.block};
                if (is_long && a.step == kTileInner)
                    a = packed_pair(a, deep, flipped, pair_of_rows);
                for (int64_t column = first; column < past; column += kTilePair) {
                    const int8_t* b =
                        product_.memory + (column / kTileSide * depth + k) * kTileBytes;
                    const int32_t* start = k ? nullptr : column_sums(product_) + column;
                    if (k + kDepth < depth && is_long)
                        prefetch_next(b, depth, row / kTilePair, height_ / kTilePair);
                    const int64_t distance = depth * kTileBytes;
                    const PairOfColumns pair{b, distance, deep, start,
                                             fetches && !row ? 2 * distance : 0};
                    kernel(a, pair, sums + row * stride + column - begin, stride,
                           std::min(kTilePair, rows_ - row));
                }
            }
        }
    }
}

const int32_t* StripMultiplier::sums() const {
    int32_t* sums = kept().sums.at_least(height_ * stride());
    multiply(0, rounded_up(product_.columns, kTilePair), sums, stride());
    return sums;
}

int64_t strip_rows(const TileProduct& product, int threads) {
    if (product.strip) return product.strip;
    const bool far = product.a.transposed && product.rows * product.inner > kFarBytes;
    const int64_t most =
        far || product.columns * product.inner > kCachedBytes ? kLongStrip : kShortStrip;
    return std::min(most, rounded_up((product.rows + 2 * threads - 1) / (2 * threads), kTilePair));
}

}  // namespace lsq

using namespace lsq;

// Packs b, for lsq_multiply_block.
LSQ_EXPORT void lsq_pack_columns(const TileProduct& product) { pack_columns(product); }

// Sums of rows [first, first + rows) to `out` [rows, columns]; all threads share their columns.
LSQ_EXPORT void lsq_multiply_block(const TileProduct& product, int64_t first, int64_t rows,
                                   int32_t* out) {
    const int64_t stride = product.columns;
#pragma omp parallel
    {
        StripMultiplier multiplier(product);
        multiplier.take(first, rows);
#pragma omp for schedule(dynamic)
        for (int64_t begin = 0; begin < stride; begin += kColumns) {
            const int64_t width = std::min(kColumns, stride - begin),
                          whole = rounded_up(width, kTilePair);
            if (width == whole && rows == multiplier.height()) {
                multiplier.multiply(begin, begin + whole, out + begin, stride);
                continue;
            }
            int32_t* sums = kept().sums.at_least(multiplier.height() * whole);
            multiplier.multiply(begin, begin + whole, sums, whole);
            for (int64_t row = 0; row < rows; ++row) {
                std::memcpy(out + row * stride + begin, sums + row * whole,
                            width * sizeof(int32_t));
            }
        }
    }
}
