// Multiplies packed tiles: AMX, AVX-512 VNNI, AVX-VNNI, and for any other processor 16-bit
// products, which all others are compared with.
//
// VNNI multiplies unsigned with signed codes: `a` comes with 128 added, so that a column starts at
// -128 times its sum.
#include "tile_kernels.h"

#include "amx.h"
#include "lanes.h"
#include "structs.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif

namespace lsq {

namespace {

typedef int16_t LaneShorts __attribute__((vector_size(4 * kLanes), may_alias));

constexpr int64_t kHalf = kTileSide / kLanes;  // vectors of a unit of a tile
constexpr int64_t kParts = kHalf < 2 ? 1 : 2;  // of these at a time
constexpr int kPlainRows = 4;                  // whose sums have registers

// Sums of products of two neighbouring half-words.
LaneWords multiply_halves(LaneShorts a, LaneShorts b) {
#if defined(__AVX512F__)
    return (LaneWords)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
    return (LaneWords)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#elif defined(__SSE2__)
    return (LaneWords)_mm_madd_epi16((__m128i)a, (__m128i)b);
#else
    const LaneWords first = (LaneWords)a << 16 >> 16, second = (LaneWords)b << 16 >> 16;
    return first * second + ((LaneWords)a >> 16) * ((LaneWords)b >> 16);
#endif
}

// Bytes 0 and 2 of each unit of four as half-words, and bytes 1 and 3.
struct Halves {
    LaneShorts even, odd;

    explicit Halves(const int8_t* from) {
        LaneShorts both;
        std::memcpy(&both, from, sizeof both);
        even = both << 8 >> 8, odd = both >> 8;
    }
};

template <int ROWS>
void multiply_plain_rows(const TileRows& a, const PairOfColumns& b, int32_t* sums, int64_t stride,
                         int64_t row) {
    const int8_t* line = a.data + row / kTileSide * a.block + row % kTileSide * a.stride;
    for (int64_t part = 0; part < 2 * kHalf; part += kParts) {
        const int8_t* columns = b.data + part / kHalf * b.distance + part % kHalf * 4 * kLanes;
        int32_t* out = sums + row * stride + part * kLanes;
        LaneWords sum[ROWS][kParts] = {};
        for (int i = 0; i < ROWS && !b.sums; ++i)
            std::memcpy(sum[i], out + i * stride, sizeof sum[i]);
        for (int64_t k = 0; k < b.depth; ++k) {
            int32_t even[ROWS][kTileUnits], odd[ROWS][kTileUnits];
            for (int i = 0; i < ROWS; ++i) {
                for (int64_t unit = 0; unit < kTileUnits; unit += kLanes) {
                    const Halves four(line + k * a.step + i * a.stride + 4 * unit);
                    std::memcpy(even[i] + unit, &four.even, sizeof four.even);
                    std::memcpy(odd[i] + unit, &four.odd, sizeof four.odd);
                }
            }
            for (int64_t unit = 0; unit < kTileUnits; ++unit) {
                const int8_t* from = columns + k * kTileBytes + unit * kTileInner;
#pragma GCC unroll 2
                for (int64_t n = 0; n < kParts; ++n) {
                    const Halves codes(from + n * 4 * kLanes);
#pragma GCC unroll 4
                    for (int i = 0; i < ROWS; ++i) {
                        sum[i][n] +=
                            multiply_halves(codes.even, (LaneShorts)(even[i][unit] + LaneWords{}));
                        sum[i][n] +=
                            multiply_halves(codes.odd, (LaneShorts)(odd[i][unit] + LaneWords{}));
                    }
                }
            }
        }
        for (int i = 0; i < ROWS; ++i) std::memcpy(out + i * stride, sum[i], sizeof sum[i]);
    }
}

void multiply_plain(const TileRows& a, const PairOfColumns& b, int32_t* sums, int64_t stride,
                    int64_t rows) {
    int64_t row = 0;
    for (; rows - row >= kPlainRows; row += kPlainRows)
        multiply_plain_rows<kPlainRows>(a, b, sums, stride, row);
    if (rows - row >= 2) multiply_plain_rows<2>(a, b, sums, stride, row), row += 2;
    if (rows - row >= 1) multiply_plain_rows<1>(a, b, sums, stride, row);
}

#if defined(__x86_64__)

#if defined(__AVX512F__)

#define LSQ_VNNI __attribute__((target("avx512vnni")))

// With two registers of columns: enough sums to hide an instruction's latency.
constexpr int kVnniRows = 8;

LSQ_VNNI void multiply_vnni(const TileRows& a, const PairOfColumns& b, int32_t* sums,
                            int64_t stride, int64_t rows) {
    for (int64_t row = 0; row < rows; row += kVnniRows) {
        const int8_t* line = a.data + row / kTileSide * a.block + row % kTileSide * a.stride;
        int32_t* out = sums + row * stride;
        __m512i low[kVnniRows], high[kVnniRows];
        for (int i = 0; i < kVnniRows; ++i) {
            const int32_t* from = b.sums ? b.sums : out + i * stride;
            low[i] = _mm512_loadu_si512(from);
            high[i] = _mm512_loadu_si512(from + kTileSide);
            if (!b.sums) continue;
            low[i] = _mm512_sub_epi32(_mm512_setzero_si512(), low[i]);
            high[i] = _mm512_sub_epi32(_mm512_setzero_si512(), high[i]);
        }
        for (int64_t k = 0; k < b.depth; ++k) {
            const int8_t *left = b.data + k * kTileBytes, *right = left + b.distance,
                         *codes = line + k * a.step;
            for (int64_t unit = 0; unit < kTileUnits; ++unit) {
                const __m512i first = _mm512_load_si512(left + unit * kTileInner);
                const __m512i second = _mm512_load_si512(right + unit * kTileInner);
#pragma GCC unroll 8
                for (int i = 0; i < kVnniRows; ++i) {
                    int32_t four;
                    std::memcpy(&four, codes + i * a.stride + 4 * unit, 4);
                    const __m512i factor = _mm512_set1_epi32(four);
                    low[i] = _mm512_dpbusd_epi32(low[i], factor, first);
                    high[i] = _mm512_dpbusd_epi32(high[i], factor, second);
                }
            }
        }
        for (int i = 0; i < kVnniRows; ++i) {
            _mm512_storeu_si512(out + i * stride, low[i]);
            _mm512_storeu_si512(out + i * stride + kTileSide, high[i]);
        }
    }
}

#endif
#if defined(LSQ_AMX)

// A tile, into the second cache.
void fetch(const int8_t* tile) {
#pragma GCC unroll 16
    for (int64_t line = 0; line < kTileSide; ++line)
        __builtin_prefetch(tile + line * kTileInner, 0, 2);
}

void multiply_amx(const TileRows& a, const PairOfColumns& b, int32_t* sums, int64_t stride,
                  int64_t rows) {
    const bool both = rows > kTileSide;
    const int64_t bytes = stride * sizeof(int32_t);
    const int8_t *upper = a.data, *lower = upper + a.block;
    int32_t *top = sums, *bottom = top + kTileSide * stride;
    if (b.sums) {
        zero_tile<0>();
        zero_tile<1>();
        zero_tile<2>();
        zero_tile<3>();
    } else {
        load_tile<0>(top, bytes);
        load_tile<1>(top + kTileSide, bytes);
        if (both) {
            load_tile<2>(bottom, bytes);
            load_tile<3>(bottom + kTileSide, bytes);
        }
    }
    for (int64_t k = 0; k < b.depth; ++k) {
        const int8_t* left = b.data + k * kTileBytes;
        if (b.ahead) {
            fetch(left + b.ahead);
            fetch(left + b.distance + b.ahead);
        }
        load_tile<4>(upper + k * a.step, a.stride);
        load_tile<6>(left, kTileInner);
        multiply_int8<0, 4, 6>();
        load_tile<7>(left + b.distance, kTileInner);
        multiply_int8<1, 4, 7>();
        if (!both) continue;
        load_tile<5>(lower + k * a.step, a.stride);
        multiply_int8<2, 5, 6>();
        multiply_int8<3, 5, 7>();
    }
    store_tile<0>(top, bytes);
    store_tile<1>(top + kTileSide, bytes);
    if (!both) return;
    store_tile<2>(bottom, bytes);
    store_tile<3>(bottom + kTileSide, bytes);
}

#endif
#if !defined(__AVX512F__) && defined(__AVX2__)

#define LSQ_VNNI __attribute__((target("avxvnni")))

constexpr int kVnniRows = 4;  // with two registers for each tile of columns, one tile at a time

LSQ_VNNI void multiply_vnni(const TileRows& a, const PairOfColumns& b, int32_t* sums,
                            int64_t stride, int64_t rows) {
    constexpr int64_t kHalf = kTileSide / 2;
    for (int64_t row = 0; row < rows; row += kVnniRows) {
        const int8_t* line = a.data + row / kTileSide * a.block + row % kTileSide * a.stride;
        for (int64_t tile = 0; tile < 2; ++tile) {
            int32_t* out = sums + row * stride + tile * kTileSide;
            __m256i low[kVnniRows], high[kVnniRows];
            for (int i = 0; i < kVnniRows; ++i) {
                const int32_t* from = b.sums ? b.sums + tile * kTileSide : out + i * stride;
                low[i] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
                high[i] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + kHalf));
                if (!b.sums) continue;
                low[i] = _mm256_sub_epi32(_mm256_setzero_si256(), low[i]);
                high[i] = _mm256_sub_epi32(_mm256_setzero_si256(), high[i]);
            }
            for (int64_t k = 0; k < b.depth; ++k) {
                const int8_t *columns = b.data + tile * b.distance + k * kTileBytes,
                             *codes = line + k * a.step;
                for (int64_t unit = 0; unit < kTileUnits; ++unit) {
                    const auto* from =
                        reinterpret_cast<const __m256i*>(columns + unit * kTileInner);
                    const __m256i first = _mm256_load_si256(from),
                                  second = _mm256_load_si256(from + 1);
#pragma GCC unroll 4
                    for (int i = 0; i < kVnniRows; ++i) {
                        int32_t four;
                        std::memcpy(&four, codes + i * a.stride + 4 * unit, 4);
                        const __m256i factor = _mm256_set1_epi32(four);
                        low[i] = _mm256_dpbusd_avx_epi32(low[i], factor, first);
                        high[i] = _mm256_dpbusd_avx_epi32(high[i], factor, second);
                    }
                }
            }
            for (int i = 0; i < kVnniRows; ++i) {
                _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + i * stride), low[i]);
                _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + i * stride + kHalf), high[i]);
            }
        }
    }
}

#endif

struct Features {
    bool avx_vnni = false, avx512_vnni = false;

    Features() {
        unsigned a, b, c, d;
        if (__get_cpuid_count(7, 0, &a, &b, &c, &d)) avx512_vnni = c >> 11 & 1;
        if (__get_cpuid_count(7, 1, &a, &b, &c, &d)) avx_vnni = a >> 4 & 1;
    }
};

#endif  // x86-64

}  // namespace

bool usable(Instructions instructions) {
    if (instructions == Instructions::plain) return true;
#if defined(LSQ_AMX)
    if (instructions == Instructions::amx) return amx_granted();
#endif
#if defined(__AVX2__)
    static const Features features;
#if defined(__AVX512F__)
    if (instructions == Instructions::avx512_vnni) return features.avx512_vnni;
#else
    if (instructions == Instructions::avx_vnni) return features.avx_vnni;
#endif
#endif
    return false;
}

Kernel kernel_of([[maybe_unused]] Instructions instructions) {
#if defined(LSQ_AMX)
    if (instructions == Instructions::amx) return multiply_amx;
#endif
#if defined(__AVX512F__)
    if (instructions == Instructions::avx512_vnni) return multiply_vnni;
#elif defined(__AVX2__)
    if (instructions == Instructions::avx_vnni) return multiply_vnni;
#endif
    return multiply_plain;
}

}  // namespace lsq

extern "C" __attribute__((visibility("default"))) int64_t lsq_tiles_usable(int64_t instructions) {
    return lsq::usable(static_cast<lsq::Instructions>(instructions));
}
