// Products of small float matrices on AMX, as exact as float32, with the interface of
// FloatProducts.
//
// A float is the sum of three bfloat16, each the upper half of the rest; for a whole number up to
// 256, one is enough. A product is that of the parts, without parts below 2^-24 of it; sums of
// whole numbers are exact.
#pragma once

#include "amx.h"
#include "products.h"

#ifdef LSQ_AMX

namespace lsq {

constexpr int64_t kTile = 16;  // rows and columns of a register of 4-byte elements
constexpr int64_t kTileWords = kTile * kTile;
constexpr int kParts = 3;  // of a float

typedef uint32_t TileRow __attribute__((vector_size(4 * kTile), may_alias));

// Tiles of 16 rows (left factor) or columns (right factor) by 32 inner indices. Word r of a row has
// inner indices r and 16 + r; in right factors it is word r of a column.
class TileFactor {
public:
    // `outer`, `inner`: at most so many; `whole`: all elements are whole numbers up to 256.
    TileFactor(int64_t outer, int64_t inner, bool whole)
        : parts_(whole ? 1 : kParts), words_(whole_units(outer) * whole_units(inner) / 2 * parts_) {
    }

    int parts() const { return parts_; }
    // The tiles of 16 rows or columns from `outer` on: for each 32 inner indices, for each part.
    const float* tiles(int64_t outer) const { return words_.get() + outer * inner_ / 2 * parts_; }

    // Fills in rows instead of take(): start(), then put() two vectors of row `o` from inner index
    // i on.
    void start(int64_t inner) { inner_ = whole_units(inner); }
    struct Row {
        TileRow* to;
        void put(int64_t i, Lanes low, Lanes high) const {
            split<kParts>(low, high, to + i / kUnit * kParts * kTile);
        }
    };
    Row row(int64_t o) const {
        return {reinterpret_cast<TileRow*>(words_.get()) +
                o / kTile * kTile * inner_ / kUnit * kParts + o % kTile};
    }

protected:
    // Element (outer o, inner i) stands in row o if ALONG, else in row i.
    template <bool ALONG, bool TRANSPOSED, class Source>
    void take(const Source& x, int64_t outer, int64_t inner) {
        if (parts_ == 1) {
            take_parts<ALONG, TRANSPOSED, 1>(x, outer, inner);
        } else {
            take_parts<ALONG, TRANSPOSED, kParts>(x, outer, inner);
        }
    }

private:
    template <bool ALONG, bool TRANSPOSED, int PARTS, class Source>
    void take_parts(const Source& x, int64_t outer, int64_t inner) {
        inner_ = whole_units(inner);
        TileRow* to = reinterpret_cast<TileRow*>(words_.get());
        for (int64_t o = 0; o < whole_units(outer); o += kTile) {
            for (int64_t i = 0; i < inner_; i += kUnit, to += PARTS * kTile) {
                TileRow waiting[TRANSPOSED ? PARTS * kTile : 1];
                TileRow* parts = TRANSPOSED ? waiting : to;
                for (int r = 0; r < kTile; ++r) {
                    const Lanes low = ALONG ? x.at(o + r, i) : x.at(i + r, o);
                    const Lanes high = ALONG ? x.at(o + r, i + kTile) : x.at(i + kTile + r, o);
                    split<PARTS>(low, high, parts + r);
                }
                if (!TRANSPOSED) continue;
                for (int part = 0; part < PARTS; ++part) {
                    transpose(reinterpret_cast<Lanes*>(waiting + part * kTile));
                    for (int r = 0; r < kTile; ++r)
                        to[part * kTile + r] = waiting[part * kTile + r];
                }
            }
        }
    }

    // Two vectors -> their parts, as pairs, a tile apart.
    template <int PARTS>
    static void split(Lanes a, Lanes b, TileRow* out) {
        for (int part = 0; part < PARTS; ++part) {
            const TileRow upper_a = (TileRow)a & 0xFFFF0000u, upper_b = (TileRow)b & 0xFFFF0000u;
            out[part * kTile] = upper_b | upper_a >> 16;
            a -= (Lanes)upper_a;
            b -= (Lanes)upper_b;
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
        template <class Source>
        void take(const Source& x, int64_t rows, int64_t inner) {
            TileFactor::take<!TRANSPOSED, TRANSPOSED>(x, rows, inner);
        }
    };

    template <bool TRANSPOSED>
    struct Right : TileFactor {
        using TileFactor::TileFactor;
        template <class Source>
        void take(const Source& x, int64_t columns, int64_t inner) {
            TileFactor::take<TRANSPOSED, TRANSPOSED>(x, columns, inner);
        }
    };

    static void multiply(const TileFactor& a, const TileFactor& b, int64_t rows, int64_t columns,
                         int64_t inner, bool add, float* out, int64_t stride, int64_t first = 0) {
        const auto with = [&](auto a_parts, auto b_parts) {
            for (int64_t column = 0; column < columns; column += kUnit) {
                for (int64_t row = 0; row < rows; row += kUnit) {
                    multiply_unit<a_parts.value, b_parts.value>(
                        a, b, row, column, whole_units(inner) / kUnit, add, rows - row > kTile,
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
    // 32 x 32 elements, or 16 rows of them.
    template <int A_PARTS, int B_PARTS>
    static void multiply_unit(const TileFactor& a, const TileFactor& b, int64_t row, int64_t column,
                              int64_t inner, bool add, bool both, float* out, int64_t stride,
                              int64_t first) {
        const int64_t bytes = 4 * stride;
        add ? load_sums(out, bytes, both) : zero_sums();
        const float *upper_a = a.tiles(row), *lower_a = a.tiles(row + kTile);
        const int64_t skipped = first / kUnit * B_PARTS * kTileWords;
        const float *left_b = b.tiles(column) + skipped,
                    *right_b = b.tiles(column + kTile) + skipped;
        for (int64_t i = 0; i < inner; ++i) {
            for (int q = 0; q < B_PARTS; ++q, left_b += kTileWords, right_b += kTileWords) {
                load_tile<6>(left_b, 64), load_tile<7>(right_b, 64);
                for (int p = 0; p < A_PARTS && p + q < kParts; ++p) {
                    load_tile<4>(upper_a + p * kTileWords, 64);
                    multiply_bfloat16<0, 4, 6>(), multiply_bfloat16<1, 4, 7>();
                    if (!both) continue;
                    load_tile<5>(lower_a + p * kTileWords, 64);
                    multiply_bfloat16<2, 5, 6>(), multiply_bfloat16<3, 5, 7>();
                }
            }
            upper_a += A_PARTS * kTileWords, lower_a += A_PARTS * kTileWords;
        }
        store_sums(out, bytes, both);
    }
};

}  // namespace lsq

#endif
