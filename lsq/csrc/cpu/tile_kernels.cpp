// Multiplies packed tiles by AMX, AVX-512 VNNI, AVX-VNNI or, on any processor, 16-bit products.
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

constexpr int64_t kHalf = kTileSide / kLanes;  // vectors of a unit of a tile
constexpr int64_t kParts = kHalf < 2 ? 1 : 2;  // of these at a time
constexpr int kPlainRows = 4;                  // whose sums have registers

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

#if defined(__AVX2__)

constexpr Instructions kVnni = kHalf == 1 ? Instructions::avx512_vnni : Instructions::avx_vnni;
constexpr int kVnniRows = kHalf == 1 ? 8 : 4;  // enough sums to hide an instruction's latency

// A tile of columns in each of two vectors, or one tile in both.
void multiply_vnni(const TileRows& a, const PairOfColumns& b, int32_t* sums, int64_t stride,
                   int64_t rows) {
    const int64_t apart = kHalf == 1 ? b.distance : static_cast<int64_t>(sizeof(LaneWords));
    for (int64_t row = 0; row < rows; row += kVnniRows) {
        const int8_t* line = a.data + row / kTileSide * a.block + row % kTileSide * a.stride;
        for (int64_t column = 0; column < kTilePair; column += 2 * kLanes) {
            int32_t* out = sums + row * stride + column;
            LaneWords low[kVnniRows], high[kVnniRows];
#pragma GCC unroll 8
            for (int i = 0; i < kVnniRows; ++i) {
                const int32_t* from = b.sums ? b.sums + column : out + i * stride;
                std::memcpy(&low[i], from, sizeof(LaneWords));
                std::memcpy(&high[i], from + kLanes, sizeof(LaneWords));
                if (b.sums) low[i] = -low[i], high[i] = -high[i];
            }
            for (int64_t k = 0; k < b.depth; ++k) {
                const int8_t *columns = b.data + column / kTileSide * b.distance + k * kTileBytes,
                             *codes = line + k * a.step;
                for (int64_t unit = 0; unit < kTileUnits; ++unit) {
                    const int8_t* from = columns + unit * kTileInner;
                    const LaneWords first = *reinterpret_cast<const LaneWords*>(from),
                                    second = *reinterpret_cast<const LaneWords*>(from + apart);
#pragma GCC unroll 8
                    for (int i = 0; i < kVnniRows; ++i) {
                        int32_t four;
                        std::memcpy(&four, codes + i * a.stride + 4 * unit, 4);
                        const LaneWords factor = four + LaneWords{};
                        add_products(low[i], factor, first);
                        add_products(high[i], factor, second);
                    }
                }
            }
#pragma GCC unroll 8
            for (int i = 0; i < kVnniRows; ++i) {
                std::memcpy(out + i * stride, &low[i], sizeof(LaneWords));
                std::memcpy(out + i * stride + kLanes, &high[i], sizeof(LaneWords));
            }
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
    b.sums ? zero_sums() : load_sums(sums, bytes, both);
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
    store_sums(sums, bytes, both);
}

#endif
#if defined(__x86_64__)

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
#if defined(__AVX2__)
    if (instructions == kVnni) return multiply_vnni;
#endif
    return multiply_plain;
}

}  // namespace lsq

extern "C" __attribute__((visibility("default"))) int64_t lsq_tiles_usable(int64_t instructions) {
    return lsq::usable(static_cast<lsq::Instructions>(instructions));
}
