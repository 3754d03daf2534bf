// wgmma: tensor cores that read shared memory themselves, for a warpgroup of four warps (compute
// capability 9.0 alone).
//
// A multiplication runs beside its threads. Until they have waited for it, operands must stay and
// sums may not be touched. All threads of a warpgroup must call these functions together.
#pragma once

#include "device.cuh"
#include "tensor_core.cuh"

namespace lsq {

constexpr int kWarpgroup = 128;

// A matrix of 128-byte rows in shared memory, from a multiple of 1,024 bytes on, chunk c of row r
// at chunk c ^ r % 8 of it ("128-byte swizzle"): as wgmma takes it.
LSQ_INLINE uint64_t swizzled_matrix(const void* first) {
    constexpr uint64_t kSwizzle128 = 1, kEightRows = 8 * 128;
    return kSwizzle128 << 62 | kEightRows / 16 << 32 | 1ull << 16 |
           (shared_address(first) & 0x3ffff) / 16;
}

// The matrix from value `k` of its rows on, a multiple of 32.
LSQ_INLINE uint64_t moved(uint64_t matrix, int k) { return matrix + k / 16; }

#ifndef LSQ_EMULATOR
// An instruction on all sums, as operands that it reads and writes; `more` are operands behind
// them.
#define LSQ_SUMS1(j) "+r"(sums[j][0]), "+r"(sums[j][1]), "+r"(sums[j][2]), "+r"(sums[j][3])
#define LSQ_SUMS4(j) LSQ_SUMS1(j), LSQ_SUMS1(j + 1), LSQ_SUMS1(j + 2), LSQ_SUMS1(j + 3)
#define LSQ_SUMS8 LSQ_SUMS4(0), LSQ_SUMS4(4)
#define LSQ_SUMS16 LSQ_SUMS8, LSQ_SUMS4(8), LSQ_SUMS4(12)
#define LSQ_SUMS32 LSQ_SUMS16, LSQ_SUMS4(16), LSQ_SUMS4(20), LSQ_SUMS4(24), LSQ_SUMS4(28)
#define LSQ_WITH_SUMS(instruction)                                                          \
    if constexpr (TILES == 8) asm volatile(instruction : LSQ_SUMS8 :: "memory");            \
    if constexpr (TILES == 16) asm volatile(instruction : LSQ_SUMS16 :: "memory");          \
    if constexpr (TILES == 32) asm volatile(instruction : LSQ_SUMS32 :: "memory")
// "%0, %1, ..."
#define LSQ_10(tens)                                                                             \
    "%" tens "0, %" tens "1, %" tens "2, %" tens "3, %" tens "4, %" tens "5, %" tens "6, %" tens \
    "7, %" tens "8, %" tens "9"
#define LSQ_30 LSQ_10("") ", " LSQ_10("1") ", " LSQ_10("2")
#define LSQ_60 LSQ_30 ", " LSQ_10("3") ", " LSQ_10("4") ", " LSQ_10("5")
#define LSQ_90 LSQ_60 ", " LSQ_10("6") ", " LSQ_10("7") ", " LSQ_10("8")
#define LSQ_120 LSQ_90 ", " LSQ_10("9") ", " LSQ_10("10") ", " LSQ_10("11")
#define LSQ_WGMMA(columns, registers, a, b)                                             \
    "{.reg .pred add; setp.eq.b32 add, 0, 0; wgmma.mma_async.sync.aligned.m64n" columns \
    "k32.s32.s8.s8 {" registers "}, " a ", " b ", add;}"
#endif

// Lowers the registers of each thread of this warpgroup to REGISTERS, a multiple of 8.
template <int REGISTERS>
LSQ_INLINE void give_registers() {
#ifndef LSQ_EMULATOR
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" :: "n"(REGISTERS));
#endif
}
// Raises them to REGISTERS, when other warpgroups of the block have given up enough.
template <int REGISTERS>
LSQ_INLINE void take_registers() {
#ifndef LSQ_EMULATOR
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" :: "n"(REGISTERS));
#endif
}

// Sums that were touched may be used by multiplications from now on. TILES: of eight columns.
template <int TILES>
LSQ_INLINE void fence_sums(int32_t (&sums)[TILES][4]) {
#ifdef LSQ_EMULATOR
    emulator_fence_sums();
#else
    LSQ_WITH_SUMS("wgmma.fence.sync.aligned;");
#endif
}

// Shows this thread's writes to shared memory, and copies that it has waited for, to
// multiplications after a barrier.
LSQ_INLINE void fence_shared() {
#ifdef LSQ_EMULATOR
    emulator_fence_shared();
#else
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

// Begins sums [64, 8 * TILES] += a [64, 32] times b [8 * TILES, 32] transposed, of int8, exact
// modulo 2^32. Warp w of the warpgroup has rows [16 * w, + 16) of the sums, in tiles as of
// mma.sync.
template <int TILES>
LSQ_INLINE void begin_multiplication(int32_t (&sums)[TILES][4], uint64_t a,
                                                     uint64_t b) {
    static_assert(TILES == 8 || TILES == 16 || TILES == 32, "64, 128 or 256 columns at a time");
#ifdef LSQ_EMULATOR
    emulator_multiply_warpgroup(sums, a, b);
#else
    if constexpr (TILES == 8)
        asm volatile(LSQ_WGMMA("64", LSQ_30 ", %30, %31", "%32", "%33")
                     : LSQ_SUMS8
                     : "l"(a), "l"(b));
    if constexpr (TILES == 16)
        asm volatile(LSQ_WGMMA("128", LSQ_60 ", %60, %61, %62, %63", "%64", "%65")
                     : LSQ_SUMS16
                     : "l"(a), "l"(b));
    if constexpr (TILES == 32)
        asm volatile(LSQ_WGMMA("256", LSQ_120 ", %120, %121, %122, %123, %124, %125, %126, %127",
                               "%128", "%129")
                     : LSQ_SUMS32
                     : "l"(a), "l"(b));
#endif
}

// Makes the multiplications since the last call a group, perhaps an empty one.
LSQ_INLINE void commit_multiplications() {
#ifdef LSQ_EMULATOR
    emulator_commit_warpgroup();
#else
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
#endif
}

// Waits until all but the newest GROUPS groups are done.
template <int GROUPS, int TILES>
LSQ_INLINE void wait_multiplications(int32_t (&sums)[TILES][4]) {
#ifdef LSQ_EMULATOR
    emulator_wait_warpgroup(GROUPS);
#else
    static_assert(GROUPS == 0 || GROUPS == 1, "as the words below are written");
    if constexpr (GROUPS == 0) {
        LSQ_WITH_SUMS("wgmma.wait_group.sync.aligned 0;");
    } else {
        LSQ_WITH_SUMS("wgmma.wait_group.sync.aligned 1;");
    }
#endif
}

}  // namespace lsq
