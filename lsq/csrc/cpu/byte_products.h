// Exact products of bytes in a core's caches, and how their factors are packed.
//
// A left factor has blocks of 32 rows by 64 inner bytes, one behind the other. A right factor has
// tiles of 16 columns by 64 inner bytes, four of which lie together: [64 / 4][16][4].
#pragma once

#include "amx.h"
#include "products.h"
#include "tiles.h"
#include "wide.h"

#if defined(LSQ_AMX) && defined(LSQ_WIDE)
#define LSQ_BYTES

namespace lsq {

constexpr int64_t kByteBlock = kTilePair * kTileInner;  // bytes of a block of rows

// Two tiles of columns, `distance` bytes apart, each followed by the next ones along the inner
// dimension. `sums`: negated initial values of the 32 columns, or null.
struct ByteColumns {
    const int8_t* tiles;
    int64_t distance;
    const int32_t* sums;
};

// AMX takes signed codes as they are.
struct AmxBytes {
    using Session = WholeTiles;
    static constexpr bool kBiased = false;

    // out [rows, 32], rows `stride` apart = blocks, `step` bytes apart, times tiles. UNSIGNED: of
    // the left factor.
    template <bool UNSIGNED>
    static void multiply(const uint8_t* blocks, int64_t step, const ByteColumns& b, int64_t depth,
                         int64_t rows, int32_t* out, int64_t stride) {
        constexpr int64_t kRows = 16, kLower = kRows * kTileInner;
        const bool both = rows > kRows;
        zero_sums();
        const int8_t *left = b.tiles, *right = left + b.distance;
        for (int64_t i = 0; i < depth;
             ++i, blocks += step, left += kTileBytes, right += kTileBytes) {
            load_tile<4>(blocks, kTileInner), load_tile<6>(left, 64), load_tile<7>(right, 64);
            add<UNSIGNED, 0, 4, 6>(), add<UNSIGNED, 1, 4, 7>();
            if (!both) continue;
            load_tile<5>(blocks + kLower, kTileInner);
            add<UNSIGNED, 2, 5, 6>(), add<UNSIGNED, 3, 5, 7>();
        }
        store_sums(out, stride * sizeof(int32_t), both);
    }

private:
    template <bool UNSIGNED, int SUM, int A, int B>
    static void add() {
        if constexpr (UNSIGNED) {
            multiply_unsigned_int8<SUM, A, B>();
        } else {
            multiply_int8<SUM, A, B>();
        }
    }
};

// AVX-512 VNNI takes unsigned left factors: codes come with 128 added, and columns begin with -128
// times their sum.
struct VnniBytes {
    struct Session {};
    static constexpr bool kBiased = true;

    // noinline keeps the sums in registers.
    template <bool UNSIGNED>
    __attribute__((noinline)) static void multiply(const uint8_t* blocks, int64_t step,
                                                   const ByteColumns& b, int64_t depth,
                                                   int64_t rows, int32_t* out, int64_t stride) {
        constexpr int kRows = 8;
        for (int64_t row = 0; row < rows;
             row += kRows, blocks += kRows * kTileInner, out += kRows * stride) {
            __m512i low[kRows], high[kRows];
#pragma GCC unroll 8
            for (int i = 0; i < kRows; ++i) {
                low[i] =
                    b.sums ? _mm512_sub_epi32(__m512i{}, _mm512_loadu_si512(b.sums)) : __m512i{};
                high[i] = b.sums
                              ? _mm512_sub_epi32(__m512i{}, _mm512_loadu_si512(b.sums + kTileSide))
                              : __m512i{};
            }
            const int8_t *left = b.tiles, *right = left + b.distance;
            for (int64_t k = 0; k < depth; ++k) {
                const uint8_t* line = blocks + k * step;
                for (int64_t four = 0; four < kTileInner;
                     four += 4, left += kTileInner, right += kTileInner) {
                    const __m512i first = _mm512_load_si512(left),
                                  second = _mm512_load_si512(right);
#pragma GCC unroll 8
                    for (int i = 0; i < kRows; ++i) {
                        int32_t bytes;
                        std::memcpy(&bytes, line + i * kTileInner + four, 4);
                        const __m512i factor = _mm512_set1_epi32(bytes);
                        add_products(low[i], factor, first);
                        add_products(high[i], factor, second);
                    }
                }
            }
#pragma GCC unroll 8
            for (int i = 0; i < kRows; ++i) {
                _mm512_storeu_si512(out + i * stride, low[i]);
                _mm512_storeu_si512(out + i * stride + kTileSide, high[i]);
            }
        }
    }
};

// 64 codes of a row from `column` on, 0 outside.
inline __m512i bytes_at(const Window<int8_t>& x, int64_t row, int64_t column) {
    const int64_t there = row < x.rows ? std::min(x.columns - column, kTileInner) : 0;
    return _mm512_maskz_loadu_epi8(there > 0 ? ~uint64_t{0} >> (64 - there) : 0,
                                   x.first + row * x.stride + column);
}

// Rows of codes -> a left factor, 128 added if BIASED.
template <bool BIASED>
void pack_rows(const Window<int8_t>& from, uint8_t* to) {
    const __m512i bias = _mm512_set1_epi8(BIASED ? -128 : 0);
    for (int64_t at = 0; at < from.columns; at += kTileInner, to += kByteBlock) {
        for (int64_t row = 0; row < from.rows; ++row) {
            _mm512_store_si512(to + row * kTileInner,
                               _mm512_xor_si512(bytes_at(from, row, at), bias));
        }
    }
}

// Rows of codes -> a right factor with them as columns, tile after tile; if BIASED, also 128 times
// the sum of each.
template <bool BIASED>
__attribute__((target("avx512vnni"))) void pack_transposed(const Window<int8_t>& from, int8_t* to,
                                                           int32_t* sums) {
    for (int64_t row = 0; row < whole_units(from.rows); row += kTileSide) {
        __m512i sum = {};
        for (int64_t at = 0; at < from.columns; at += kTileInner, to += kTileBytes) {
            Lanes words[kTileSide];
            for (int i = 0; i < kTileSide; ++i)
                words[i] = _mm512_castsi512_ps(bytes_at(from, row + i, at));
            transpose(words);
            for (int i = 0; i < kTileSide; ++i) {
                const __m512i four = _mm512_castps_si512(words[i]);
                if (BIASED) sum = _mm512_dpbusd_epi32(sum, _mm512_set1_epi8(-128), four);
                _mm512_store_si512(to + i * kTileInner, four);
            }
        }
        if (BIASED) _mm512_storeu_si512(sums + row, sum);
    }
}

// Rows of codes -> a right factor of as many inner indices; tiles of other columns are `distance`
// bytes apart. Of 64 rows 0, 32, 16 and 48 lie together, and so on, as pack_integers writes them.
inline void pack_along(const Window<int8_t>& from, int8_t* to, int64_t distance) {
    for (int64_t group = 0; group < from.rows; group += kTileInner, to += kTileBytes) {
        for (int64_t i = 0; i < 16; ++i) {
            for (int64_t at = 0; at < whole_units(from.columns); at += kTileInner) {
                const int64_t row = group + i;
                const __m512i a = bytes_at(from, row, at), b = bytes_at(from, row + 32, at);
                const __m512i c = bytes_at(from, row + 16, at), d = bytes_at(from, row + 48, at);
                const __m512i ab_low = _mm512_unpacklo_epi8(a, b),
                              ab_high = _mm512_unpackhi_epi8(a, b);
                const __m512i cd_low = _mm512_unpacklo_epi8(c, d),
                              cd_high = _mm512_unpackhi_epi8(c, d);
                const __m512i u0 = _mm512_unpacklo_epi16(ab_low, cd_low),
                              u1 = _mm512_unpackhi_epi16(ab_low, cd_low);
                const __m512i u2 = _mm512_unpacklo_epi16(ab_high, cd_high);
                const __m512i u3 = _mm512_unpackhi_epi16(ab_high, cd_high);
                const __m512i even01 = _mm512_shuffle_i32x4(u0, u1, 0x88),
                              odd01 = _mm512_shuffle_i32x4(u0, u1, 0xDD);
                const __m512i even23 = _mm512_shuffle_i32x4(u2, u3, 0x88),
                              odd23 = _mm512_shuffle_i32x4(u2, u3, 0xDD);
                const __m512i columns[4] = {_mm512_shuffle_i32x4(even01, even23, 0x88),
                                            _mm512_shuffle_i32x4(odd01, odd23, 0x88),
                                            _mm512_shuffle_i32x4(even01, even23, 0xDD),
                                            _mm512_shuffle_i32x4(odd01, odd23, 0xDD)};
                for (int64_t tile = 0;
                     tile < 4 && at + tile * kTileSide < whole_units(from.columns); ++tile) {
                    const int64_t number = at / kTileSide + tile;
                    _mm512_store_si512(to + number * distance + i * kTileInner, columns[tile]);
                }
            }
        }
    }
}

constexpr int kByteParts = 3;

// 64 integers of 24 bits -> their bytes, the lowest first, 64 of each in the order of pack_along,
// `step` bytes apart.
inline void pack_integers(__m512i a, __m512i b, __m512i c, __m512i d, uint8_t* to, int64_t step) {
    const __m512i halves = _mm512_set1_epi32(0xFFFF), bytes = _mm512_set1_epi16(0xFF);
    constexpr int kSelect = 0xCA;  // first operand ? second : third
    const __m512i ab = _mm512_ternarylogic_epi32(halves, a, _mm512_slli_epi32(b, 16), kSelect);
    const __m512i cd = _mm512_ternarylogic_epi32(halves, c, _mm512_slli_epi32(d, 16), kSelect);
    const __m512i ab_top = _mm512_ternarylogic_epi32(halves, _mm512_srli_epi32(a, 16), b, kSelect);
    const __m512i cd_top = _mm512_ternarylogic_epi32(halves, _mm512_srli_epi32(c, 16), d, kSelect);
    _mm512_store_si512(to, _mm512_ternarylogic_epi32(bytes, ab, _mm512_slli_epi16(cd, 8), kSelect));
    _mm512_store_si512(to + step,
                       _mm512_ternarylogic_epi32(bytes, _mm512_srli_epi16(ab, 8), cd, kSelect));
    _mm512_store_si512(to + 2 * step, _mm512_or_si512(ab_top, _mm512_slli_epi16(cd_top, 8)));
}

}  // namespace lsq

#endif
