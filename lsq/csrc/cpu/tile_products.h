// Products of small float matrices on AMX, as exact as in float32: the same interface as FloatProducts.
//
// A float is the sum of three bfloat16, each the upper half of what the others leave; of a whole number up to 256, one
// is enough. A product of two floats is that of their parts, without what is below 2^-24 of it. So sums of whole
// numbers are exact.
#pragma once

#include "amx.h"
#include "products.h"

#ifdef LSQ_AMX

namespace lsq {

constexpr int64_t kTile = 16;  // rows and columns of a register of 4-byte elements
constexpr int64_t kTileWords = kTile * kTile;
constexpr int kParts = 3;  // of a float

typedef uint32_t TileRow __attribute__((vector_size(4 * kTile), may_alias));

// Transposes 16 rows of 16 words: each pass rotates the bits of an element's place by one.
inline void transpose_tile(const TileRow* rows, TileRow* out) {
    TileRow now[kTile], next[kTile];
    for (int i = 0; i < kTile; ++i) now[i] = rows[i];
    for (int pass = 0; pass < 4; ++pass) {
        for (int i = 0; i < kTile / 2; ++i) {
            const TileRow a = now[i], b = now[i + kTile / 2];
            next[2 * i] = __builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
            next[2 * i + 1] =
                __builtin_shufflevector(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
        }
        for (int i = 0; i < kTile; ++i) now[i] = next[i];
    }
    for (int i = 0; i < kTile; ++i) out[i] = now[i];
}

// A factor as registers want it: tiles of 16 rows (of a left factor) or columns (of a right one) by 32 inner indices.
// Word r of a row holds the inner indices r and 16 + r; in right factors it is word r of a column.
class TileFactor {
public:
    // `outer`, `inner`: at most so many; `whole`: all elements are whole numbers up to 256.
    TileFactor(int64_t outer, int64_t inner, bool whole)
        : parts_(whole ? 1 : kParts), words_(whole_units(outer) * whole_units(inner) / 2 * parts_) {}

    int parts() const { return parts_; }
    // The tiles of 16 rows or columns from `outer` on: for each 32 inner indices, for each part.
    const float* tiles(int64_t outer) const { return words_.get() + outer * inner_ / 2 * parts_; }

protected:
    // Element (outer o, inner i) stands at x[o * stride + i] if ALONG, else at x[i * stride + o].
    template <bool ALONG, bool TRANSPOSED>
    void take(const float* x, int64_t stride, int64_t outer, int64_t inner) {
        if (parts_ == 1) {
            take_parts<ALONG, TRANSPOSED, 1>(x, stride, outer, inner);
        } else {
            take_parts<ALONG, TRANSPOSED, kParts>(x, stride, outer, inner);
        }
    }

private:
    template <bool ALONG, bool TRANSPOSED, int PARTS>
    void take_parts(const float* x, int64_t stride, int64_t outer, int64_t inner) {
        inner_ = whole_units(inner);
        TileRow* to = reinterpret_cast<TileRow*>(words_.get());
        const int64_t between = ALONG ? kTile : kTile * stride;  // both halves of a word
        for (int64_t o = 0; o < whole_units(outer); o += kTile) {
            for (int64_t i = 0; i < inner_; i += kUnit, to += PARTS * kTile) {
                const float* from = ALONG ? x + o * stride + i : x + i * stride + o;
                TileRow waiting[TRANSPOSED ? PARTS * kTile : 1];
                TileRow* parts = TRANSPOSED ? waiting : to;
                for (int r = 0; r < kTile; ++r, from += stride) split<PARTS>(from, from + between, parts + r);
                if (!TRANSPOSED) continue;
                for (int part = 0; part < PARTS; ++part) transpose_tile(waiting + part * kTile, to + part * kTile);
            }
        }
    }

    // Rows of 16 floats each -> their parts, as pairs.
    template <int PARTS>
    static void split(const float* low, const float* high, TileRow* out) {
        typedef float Row __attribute__((vector_size(4 * kTile), may_alias, aligned(4)));
        Row a = *reinterpret_cast<const Row*>(low), b = *reinterpret_cast<const Row*>(high);
        for (int part = 0; part < PARTS; ++part) {
            const TileRow upper_a = (TileRow)a & 0xFFFF0000u, upper_b = (TileRow)b & 0xFFFF0000u;
            out[part * kTile] = upper_b | upper_a >> 16;
            a -= (Row)upper_a;
            b -= (Row)upper_b;
        }
    }

    int parts_;
    AlignedFloats words_;
    int64_t inner_ = 0;  // indices, in whole units
};

struct TileProducts {
    using Session = WholeTiles;

    template <bool TRANSPOSED>
    struct Left : TileFactor {
        using TileFactor::TileFactor;
        void take(const float* x, int64_t stride, int64_t rows, int64_t inner) {
            TileFactor::take<!TRANSPOSED, TRANSPOSED>(x, stride, rows, inner);
        }
    };

    template <bool TRANSPOSED>
    struct Right : TileFactor {
        using TileFactor::TileFactor;
        void take(const float* x, int64_t stride, int64_t columns, int64_t inner) {
            TileFactor::take<TRANSPOSED, TRANSPOSED>(x, stride, columns, inner);
        }
    };

    static void multiply(const TileFactor& a, const TileFactor& b, int64_t rows, int64_t columns, int64_t inner,
                         bool add, float* out, int64_t stride, int64_t first = 0) {
        const auto with = [&](auto a_parts, auto b_parts) {
            for (int64_t column = 0; column < columns; column += kUnit) {
                for (int64_t row = 0; row < rows; row += kUnit) {
                    multiply_unit<a_parts.value, b_parts.value>(a, b, row, column, whole_units(inner) / kUnit, add,
                                                                out + row * stride + column, stride, first);
                }
            }
        };
        constexpr std::integral_constant<int, 1> one;
        constexpr std::integral_constant<int, kParts> all;
        if (a.parts() == 1) return b.parts() == 1 ? with(one, one) : with(one, all);
        b.parts() == 1 ? with(all, one) : with(all, all);
    }

private:
    // 32 x 32 elements.
    template <int A_PARTS, int B_PARTS>
    static void multiply_unit(const TileFactor& a, const TileFactor& b, int64_t row, int64_t column, int64_t inner,
                              bool add, float* out, int64_t stride, int64_t first) {
        float* lower = out + kTile * stride;
        const int64_t bytes = 4 * stride;
        if (add) {
            load_tile<0>(out, bytes), load_tile<1>(out + kTile, bytes);
            load_tile<2>(lower, bytes), load_tile<3>(lower + kTile, bytes);
        } else {
            zero_tile<0>(), zero_tile<1>(), zero_tile<2>(), zero_tile<3>();
        }
        const float *upper_a = a.tiles(row), *lower_a = a.tiles(row + kTile);
        const int64_t skipped = first / kUnit * B_PARTS * kTileWords;
        const float *left_b = b.tiles(column) + skipped, *right_b = b.tiles(column + kTile) + skipped;
        for (int64_t i = 0; i < inner; ++i) {
            for (int q = 0; q < B_PARTS; ++q, left_b += kTileWords, right_b += kTileWords) {
                load_tile<6>(left_b, 64), load_tile<7>(right_b, 64);
                for (int p = 0; p < A_PARTS && p + q < kParts; ++p) {
                    load_tile<4>(upper_a + p * kTileWords, 64), load_tile<5>(lower_a + p * kTileWords, 64);
                    multiply_bfloat16<0, 4, 6>(), multiply_bfloat16<1, 4, 7>();
                    multiply_bfloat16<2, 5, 6>(), multiply_bfloat16<3, 5, 7>();
                }
            }
            upper_a += A_PARTS * kTileWords, lower_a += A_PARTS * kTileWords;
        }
        store_tile<0>(out, bytes), store_tile<1>(out + kTile, bytes);
        store_tile<2>(lower, bytes), store_tile<3>(lower + kTile, bytes);
    }
};

}  // namespace lsq

#endif
