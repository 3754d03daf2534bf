// Multiplies packed tiles: AMX, AVX-512 VNNI, AVX-VNNI, and plain C++, which all others are compared with.
//
// VNNI multiplies unsigned with signed codes: `a` comes with 128 added, so that a column starts at -128 times its sum.
#include "tile_kernels.h"

#include "structs.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace lsq {

namespace {

constexpr int64_t kUnits = kTileInner / 4;

void multiply_plain(const TileRows& a, int64_t rows, const PairOfColumns& b, int32_t* sums, int64_t stride) {
    for (int64_t row = 0; row < rows; ++row) {
        const int8_t* line = a.data + row / kTileSide * a.block + row % kTileSide * a.stride;
        for (int64_t half = 0; half < 2; ++half) {
            int32_t* out = sums + row * stride + half * kTileSide;
            int32_t sum[kTileSide] = {};
            if (!b.sums) std::memcpy(sum, out, sizeof sum);
            for (int64_t k = 0; k < b.depth; ++k) {
                const int8_t* tile = b.data + half * b.distance + k * kTileBytes;
                for (int64_t i = 0; i < kTileInner; ++i) {
                    const int32_t factor = line[k * a.step + i];
                    const int8_t* unit = tile + i / 4 * kTileInner + i % 4;
                    for (int64_t n = 0; n < kTileSide; ++n) sum[n] += factor * unit[4 * n];
                }
            }
            std::memcpy(out, sum, sizeof sum);
        }
    }
}

#if defined(__x86_64__)

#if defined(__AVX512F__)

#define LSQ_VNNI __attribute__((target("avx512vnni")))

constexpr int kVnniRows = 8;  // with two registers of columns: enough sums to hide an instruction's latency

LSQ_VNNI void multiply_vnni(const TileRows& a, int64_t rows, const PairOfColumns& b, int32_t* sums, int64_t stride) {
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
            const int8_t *left = b.data + k * kTileBytes, *right = left + b.distance, *codes = line + k * a.step;
            for (int64_t unit = 0; unit < kUnits; ++unit) {
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

#define LSQ_AMX __attribute__((target("amx-tile,amx-int8")))

struct alignas(64) TileConfiguration {
    uint8_t palette = 1, start = 0, reserved[14] = {};
    uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

const TileConfiguration configuration;  // not on the stack: compilers do not see that the instruction reads all of it

LSQ_AMX void load_configuration() { _tile_loadconfig(&configuration); }

LSQ_AMX void release_tiles() { _tile_release(); }

LSQ_AMX void multiply_amx(const TileRows& a, int64_t rows, const PairOfColumns& b, int32_t* sums, int64_t stride) {
    const int64_t bytes = stride * sizeof(int32_t);
    for (int64_t row = 0; row < rows; row += kTilePair) {
        const int8_t *upper = a.data + row / kTileSide * a.block, *lower = upper + a.block;
        int32_t *top = sums + row * stride, *bottom = top + kTileSide * stride;
        if (b.sums) {
            _tile_zero(0);
            _tile_zero(1);
            _tile_zero(2);
            _tile_zero(3);
        } else {
            _tile_loadd(0, top, bytes);
            _tile_loadd(1, top + kTileSide, bytes);
            _tile_loadd(2, bottom, bytes);
            _tile_loadd(3, bottom + kTileSide, bytes);
        }
        for (int64_t k = 0; k < b.depth; ++k) {
            const int8_t* left = b.data + k * kTileBytes;
            _tile_loadd(4, upper + k * a.step, a.stride);
            _tile_loadd(6, left, kTileInner);
            _tile_dpbssd(0, 4, 6);
            _tile_loadd(7, left + b.distance, kTileInner);
            _tile_dpbssd(1, 4, 7);
            _tile_loadd(5, lower + k * a.step, a.stride);
            _tile_dpbssd(2, 5, 6);
            _tile_dpbssd(3, 5, 7);
        }
        _tile_stored(0, top, bytes);
        _tile_stored(1, top + kTileSide, bytes);
        _tile_stored(2, bottom, bytes);
        _tile_stored(3, bottom + kTileSide, bytes);
    }
}

#elif defined(__AVX2__)

#define LSQ_VNNI __attribute__((target("avxvnni")))

constexpr int kVnniRows = 4;  // with two registers for each tile of columns, one tile at a time

LSQ_VNNI void multiply_vnni(const TileRows& a, int64_t rows, const PairOfColumns& b, int32_t* sums, int64_t stride) {
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
                const int8_t *columns = b.data + tile * b.distance + k * kTileBytes, *codes = line + k * a.step;
                for (int64_t unit = 0; unit < kUnits; ++unit) {
                    const auto* from = reinterpret_cast<const __m256i*>(columns + unit * kTileInner);
                    const __m256i first = _mm256_load_si256(from), second = _mm256_load_si256(from + 1);
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
    bool avx_vnni = false, avx512_vnni = false, amx = false;

    Features() {
        unsigned a, b, c, d;
        if (__get_cpuid_count(7, 0, &a, &b, &c, &d)) {
            avx512_vnni = c >> 11 & 1;
            amx = (d >> 24 & 1) && (d >> 25 & 1) && granted();
        }
        if (__get_cpuid_count(7, 1, &a, &b, &c, &d)) avx_vnni = a >> 4 & 1;
    }

    // Linux keeps the tiles' registers for those processes alone that ask for them.
    static bool granted() {
#if defined(__linux__)
        constexpr long kRequestPermission = 0x1023, kTileData = 18;
        return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
        return false;
#endif
    }
};

#endif  // x86-64

}  // namespace

bool usable(Instructions instructions) {
    if (instructions == Instructions::plain) return true;
#if defined(__AVX2__)
    static const Features features;
#if defined(__AVX512F__)
    if (instructions == Instructions::avx512_vnni) return features.avx512_vnni;
    if (instructions == Instructions::amx) return features.amx;
#else
    if (instructions == Instructions::avx_vnni) return features.avx_vnni;
#endif
#endif
    return false;
}

Kernel kernel_of([[maybe_unused]] Instructions instructions) {
#if defined(__AVX512F__)
    if (instructions == Instructions::amx) return multiply_amx;
    if (instructions == Instructions::avx512_vnni) return multiply_vnni;
#elif defined(__AVX2__)
    if (instructions == Instructions::avx_vnni) return multiply_vnni;
#endif
    return multiply_plain;
}

void begin_tiles([[maybe_unused]] Instructions instructions) {
#if defined(__AVX512F__)
    if (instructions == Instructions::amx) load_configuration();
#endif
}

void end_tiles([[maybe_unused]] Instructions instructions) {
#if defined(__AVX512F__)
    if (instructions == Instructions::amx) release_tiles();
#endif
}

}  // namespace lsq

extern "C" __attribute__((visibility("default"))) int64_t lsq_tiles_usable(int64_t instructions) {
    return lsq::usable(static_cast<lsq::Instructions>(instructions));
}
