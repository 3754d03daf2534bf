// Products whose sums are read by blocks of columns, on all threads, because rows are too long for
// a cache.
//
// A thread makes a reader by make() and calls reader(block), with every row and column once. Blocks
// begin at multiples of `width`, so that sums over them depend on neither threads nor strips.
#pragma once

#include "strips.h"
#include "structs.h"

namespace lsq {

// Rows [row, row + rows) of columns [column, column + columns): int32 sums or floats, `stride`
// elements apart.
template <class T>
struct SumsBlock {
    int64_t row, rows, column, columns;
    const T* sums;
    int64_t stride;
};

constexpr int64_t kBlockRows = 1024;  // for which a thread packs a block of columns
// Rows that it multiplies at a time, unless the product says how many.
constexpr int64_t kBlockStrip = 64;

// A thread packs the columns that it multiplies: they are read once, and nobody waits.
template <class Make>
void multiply_columns(const TileProduct& product, int64_t width, const Make& make) {
    const int64_t strip = product.strip ? product.strip : kBlockStrip;
#pragma omp parallel
    {
        auto reader = make();
        Kept<int8_t> packed;
#pragma omp for collapse(2) schedule(dynamic)
        for (int64_t begin = 0; begin < product.rows; begin += kBlockRows) {
            for (int64_t column = 0; column < product.columns; column += width) {
                TileProduct part = product;
                part.columns = std::min(width, product.columns - column);
                part.b.data += column * (part.b.transposed ? 1 : part.b.stride);
                part.memory = packed.at_least(packed_bytes(width, product.inner));
                for (int64_t group = 0; group < groups_of_columns(part); ++group)
                    pack_columns(part, group);
                StripMultiplier multiplier(part);
                const int64_t end = std::min(begin + kBlockRows, product.rows);
                for (int64_t first = begin; first < end; first += strip) {
                    const int64_t count = std::min(strip, end - first);
                    multiplier.take(first, count);
                    const int32_t* sums = multiplier.sums();
                    reader(SumsBlock<int32_t>{first, count, column, part.columns, sums,
                                              multiplier.stride()});
                }
            }
        }
    }
}

// Reads rows [first, first + rows) of float logits [rows, columns].
template <class Make>
void read_columns(const float* logits, int64_t first, int64_t rows, const Prediction& given,
                  const Make& make) {
    const int64_t columns = given.columns, width = given.block_columns;
#pragma omp parallel
    {
        auto reader = make();
#pragma omp for collapse(2) schedule(static)
        for (int64_t begin = 0; begin < rows; begin += kTilePair) {
            for (int64_t column = 0; column < columns; column += width) {
                const int64_t count = std::min(kTilePair, rows - begin),
                              wide = std::min(width, columns - column);
                const float* block = logits + begin * columns + column;
                reader(SumsBlock<float>{first + begin, count, column, wide, block, columns});
            }
        }
    }
}

}  // namespace lsq
