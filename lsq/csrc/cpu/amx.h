// AMX, Intel's registers of 16 rows of 64 bytes: whether this process may use them, and the
// instructions that do.
#pragma once

#if defined(__AVX512F__) && defined(__x86_64__) && defined(__linux__)
#define LSQ_AMX

#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>

namespace lsq {

// Whether the processor has AMX with bfloat16 and int8, and the system grants it.
inline bool amx_granted() {
    static const bool granted = [] {
        constexpr unsigned kBfloat16 = 1u << 22, kTile = 1u << 24, kInt8 = 1u << 25;
        constexpr unsigned kNeeded = kBfloat16 | kTile | kInt8;
        constexpr long kAskFor = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
        unsigned a, b, c, d;
        if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & kNeeded) != kNeeded) return false;
        return syscall(SYS_arch_prctl, kAskFor, kTileData) == 0;
    }();
    return granted;
}

// Configures the thread's eight registers as 16 rows of 64 bytes, as long as it lives.
class WholeTiles {
public:
    WholeTiles() {
        struct alignas(64) {
            uint8_t palette = 1, start = 0, reserved[14] = {};
            uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
            uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
        } const all;
        asm volatile("ldtilecfg %0" ::"m"(all));
    }
    ~WholeTiles() { asm volatile("tilerelease"); }
    WholeTiles(const WholeTiles&) = delete;
    WholeTiles& operator=(const WholeTiles&) = delete;
};

template <int TILE>
inline void zero_tile() {
    asm volatile("tilezero %%tmm%c0" ::"i"(TILE));
}

template <int TILE>
inline void load_tile(const void* from, int64_t stride) {
    asm volatile("tileloadd (%1,%2,1), %%tmm%c0" ::"i"(TILE), "r"(from), "r"(stride) : "memory");
}

template <int TILE>
inline void store_tile(void* to, int64_t stride) {
    asm volatile("tilestored %%tmm%c0, (%1,%2,1)" ::"i"(TILE), "r"(to), "r"(stride) : "memory");
}

// sum [16, 16] int32 += a [16, 64] b [64, 16], int8; b as 16 rows of fours.
template <int SUM, int A, int B>
inline void multiply_int8() {
    asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(SUM), "i"(A), "i"(B));
}

// multiply_int8 of unsigned bytes a.
template <int SUM, int A, int B>
inline void multiply_unsigned_int8() {
    asm volatile("tdpbusd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(SUM), "i"(A), "i"(B));
}

// multiply_int8 by unsigned bytes b.
template <int SUM, int A, int B>
inline void multiply_by_unsigned_int8() {
    asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(SUM), "i"(A), "i"(B));
}

// sum [16, 16] float32 += a [16, 32] b [32, 16], bfloat16; b as 16 rows of pairs. Subnormals count
// as 0.
template <int SUM, int A, int B>
inline void multiply_bfloat16() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(SUM), "i"(A), "i"(B));
}

// Registers 0 to 3 as 32 x 32 sums of 4 bytes, rows `stride` bytes apart: 0 and 1 have the upper 16
// rows, 2 and 3 the lower ones, which are left out unless `both`.
inline void zero_sums() { zero_tile<0>(), zero_tile<1>(), zero_tile<2>(), zero_tile<3>(); }

inline void load_sums(const void* from, int64_t stride, bool both) {
    const char *upper = static_cast<const char*>(from), *lower = upper + 16 * stride;
    load_tile<0>(upper, stride), load_tile<1>(upper + 64, stride);
    if (both) load_tile<2>(lower, stride), load_tile<3>(lower + 64, stride);
}

inline void store_sums(void* to, int64_t stride, bool both) {
    char *upper = static_cast<char*>(to), *lower = upper + 16 * stride;
    store_tile<0>(upper, stride), store_tile<1>(upper + 64, stride);
    if (both) store_tile<2>(lower, stride), store_tile<3>(lower + 64, stride);
}

}  // namespace lsq

#endif
