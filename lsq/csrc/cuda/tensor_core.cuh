// Tensor cores, and loads of their operands: the only file with their PTX beside warpgroup.cuh.
//
// Fragments are those of mma.sync m16n8k32 of int8, m16n8k16 of bfloat16 and m16n8k256 of bits: a
// row is 32 bytes in all of them. With lane = 4 * group + part: a, 16 rows, has bytes
// [16 * i + 4 * part, + 4) of row `group` in word 2 * i, and of row group + 8 in word 2 * i + 1; b,
// 8 rows, of row `group`, in word i; sums [16, 8] has columns 2 * part and 2 * part + 1 of row
// `group` in numbers 0 and 1, of row group + 8 in 2 and 3. All lanes of a warp must call the
// functions that multiply and `load_matrices` together.
#pragma once

#include "device.cuh"

namespace lsq {

// sums += a times b transposed, of int8: exact modulo 2^32.
LSQ_INLINE void multiply(int32_t (&sums)[4], const uint32_t (&a)[4],
                                         const uint32_t (&b)[2]) {
#ifdef LSQ_EMULATOR
    emulator_multiply(sums, a, b);
#else
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, "
        "%9}, {%0, %1, %2, %3};"
        : "+r"(sums[0]), "+r"(sums[1]), "+r"(sums[2]), "+r"(sums[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#endif
}

// sums += the number of bits that a row of a [16, 256] and a row of b [8, 256] both have. It is one
// instruction on sm_80 to sm_90. For later GPUs the compiler makes eight int8 instructions of it.
LSQ_INLINE void multiply_bits(int32_t (&sums)[4], const uint32_t (&a)[4],
                                              const uint32_t (&b)[2]) {
#ifdef LSQ_EMULATOR
    emulator_multiply_bits(sums, a, b);
#else
    asm("mma.sync.aligned.m16n8k256.row.col.s32.b1.b1.s32.and.popc {%0, %1, %2, %3}, {%4, %5, %6, "
        "%7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+r"(sums[0]), "+r"(sums[1]), "+r"(sums[2]), "+r"(sums[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#endif
}

// sums += a times b transposed, of int8. a [16, 64] is 2:4 sparse and has its 32 kept values per
// row as a dense a would; b [8, 64] has byte 16 * i + 4 * part of row `group` in word i. `kept`:
// their positions, as in lsq/models/sparsity/packed.py: eight groups of four, four bits each, of
// row `group` in parts 0 and 2, of row group + 8 in 1 and 3, the first 32 columns in 0 and 1.
LSQ_INLINE void multiply_sparse(int32_t (&sums)[4], const uint32_t (&a)[4],
                                                const uint32_t (&b)[4], uint32_t kept) {
#ifdef LSQ_EMULATOR
    emulator_multiply_sparse(sums, a, b, kept);
#else
    asm("mma.sp::ordered_metadata.sync.aligned.m16n8k64.row.col.s32.s8.s8.s32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9, %10, %11}, {%0, %1, %2, %3}, %12, 0x0;"
        : "+r"(sums[0]), "+r"(sums[1]), "+r"(sums[2]), "+r"(sums[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(b[2]), "r"(b[3]),
          "r"(kept));
#endif
}

// As `multiply`, of bfloat16. Products are exact, and sums of whole numbers below 2^24 are.
LSQ_INLINE void multiply(float (&sums)[4], const uint32_t (&a)[4],
                                         const uint32_t (&b)[2]) {
#ifdef LSQ_EMULATOR
    emulator_multiply(sums, a, b);
#else
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#endif
}

// Two floats as bfloat16, rounded to nearest even, `low` in the lower half.
LSQ_INLINE uint32_t bfloat16_pair(float low, float high) {
#ifdef LSQ_EMULATOR
    return emulator_bfloat16_pair(low, high);
#else
    uint32_t pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
#endif
}

LSQ_INLINE uint32_t shared_address(const void* address) {
#ifdef LSQ_EMULATOR
    return emulator_shared_address(address);
#else
    return static_cast<uint32_t>(__cvta_generic_to_shared(address));
#endif
}

// Loads matrices of 8 rows of 16 bytes from shared memory; lane i gives the address of row i % 8 of
// matrix i / 8, a multiple of 16, and gets bytes [4 * part, + 4) of row `group` of each;
// transposed, as a matrix of 8 x 8 two-byte values.
template <int MATRICES, bool TRANSPOSED = false>
LSQ_INLINE void load_matrices(const void* row, uint32_t (&words)[MATRICES]) {
    static_assert(MATRICES == 1 || MATRICES == 2 || MATRICES == 4, "1, 2 or 4 at a time");
#ifdef LSQ_EMULATOR
    emulator_load_matrices<MATRICES, TRANSPOSED>(row, words);
#else
#define LSQ_LDMATRIX(number, form, registers, ...)                                         \
    if constexpr (MATRICES == number && TRANSPOSED)                                        \
        asm volatile("ldmatrix.sync.aligned.m8n8." form ".trans.shared.b16 " registers ";" \
                     : __VA_ARGS__                                                         \
                     : "r"(shared_address(row))                                            \
                     : "memory");                                                          \
    if constexpr (MATRICES == number && !TRANSPOSED)                                       \
    asm volatile("ldmatrix.sync.aligned.m8n8." form ".shared.b16 " registers ";"           \
                 : __VA_ARGS__                                                             \
                 : "r"(shared_address(row))                                                \
                 : "memory")
    LSQ_LDMATRIX(1, "x1", "{%0}, [%1]", "=r"(words[0]));
    LSQ_LDMATRIX(2, "x2", "{%0, %1}, [%2]", "=r"(words[0]), "=r"(words[1]));
    LSQ_LDMATRIX(4, "x4", "{%0, %1, %2, %3}, [%4]", "=r"(words[0]), "=r"(words[1]), "=r"(words[2]),
                 "=r"(words[3]));
#undef LSQ_LDMATRIX
#endif
}

// Begins to copy BYTES (4, 8 or 16) from global to shared memory, both at multiples of BYTES; zeros
// unless `inside`. This thread sees them once it has waited, others after a barrier.
template <int BYTES>
LSQ_INLINE void copy_async(void* to, const void* from, bool inside = true) {
    static_assert(BYTES == 4 || BYTES == 8 || BYTES == 16, "4, 8 or 16 bytes at a time");
#ifdef LSQ_EMULATOR
    emulator_copy_async(to, from, BYTES, !inside);
#else
    const uint32_t wanted = inside ? BYTES : 0;
    if constexpr (BYTES == 16) {  // past the L1 cache
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                     :: "r"(shared_address(to)), "l"(from), "r"(wanted) : "memory");
    } else {
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;"
                     :: "r"(shared_address(to)), "l"(from), "n"(BYTES), "r"(wanted) : "memory");
    }
#endif
}

// Makes the copies since the last call a group, perhaps an empty one.
LSQ_INLINE void commit_copies() {
#ifdef LSQ_EMULATOR
    emulator_commit_copies();
#else
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Waits until all but the newest GROUPS groups of this thread have arrived.
template <int GROUPS>
LSQ_INLINE void wait_copies() {
#ifdef LSQ_EMULATOR
    emulator_wait_copies(GROUPS);
#else
    asm volatile("cp.async.wait_group %0;" :: "n"(GROUPS) : "memory");
#endif
}

}  // namespace lsq
