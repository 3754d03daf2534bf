// Instructions of tensor cores and of their operands' loads, as functions for tensor_core.cuh.
//
// Layouts are those of "Warp Level Matrix Multiply-Accumulate Instructions" in NVIDIA's PTX ISA,
// with group = lane / 4, part = lane % 4.
#pragma once

#include <cstdint>
#include <cstring>

#include "services.h"

// Rounds a float to the bits of a bfloat16, to nearest even.
inline uint16_t emulator_float_to_bfloat16(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    if (x != x) return 0x7FFF;
    return static_cast<uint16_t>((bits + 0x7FFFu + (bits >> 16 & 1)) >> 16);
}

namespace emulator {

#define EMULATOR_TOGETHER __attribute__((noinline, no_sanitize_thread))

constexpr int WARP = 32;

template <class Sum>
struct Multiplication {
    uint32_t a[4], b[2];
    Sum sums[4];
};

// Byte k of a fragment's row: word k / 16 of lane `4 * row + k / 4 % 4`.
inline int byte_of(const uint32_t* words, int stride, int k) {
    return static_cast<int8_t>(words[k / 16 * stride] >> 8 * (k % 4));
}

EMULATOR_TOGETHER inline void multiply_bytes(void* const* operands) {
    const auto of = [operands](int lane) {
        return static_cast<Multiplication<int32_t>*>(operands[lane]);
    };
    for (int row = 0; row < 16; ++row) {
        for (int column = 0; column < 8; ++column) {
            int64_t sum = 0;
            for (int k = 0; k < 32; ++k) {
                const int part = k / 4 % 4;
                sum += byte_of(of(row % 8 * 4 + part)->a + row / 8, 2, k) *
                       byte_of(of(column * 4 + part)->b, 1, k);
            }
            // Sums wrap around.
            int32_t& found = of(row % 8 * 4 + column / 2)->sums[row / 8 * 2 + column % 2];
            found = static_cast<int32_t>(static_cast<uint32_t>(found) + static_cast<uint32_t>(sum));
        }
    }
}

// Bits lie as bytes do in multiply_bytes: word k / 128 of lane `4 * row + k / 32 % 4`.
EMULATOR_TOGETHER inline void multiply_bits(void* const* operands) {
    const auto of = [operands](int lane) {
        return static_cast<Multiplication<int32_t>*>(operands[lane]);
    };
    for (int row = 0; row < 16; ++row) {
        for (int column = 0; column < 8; ++column) {
            uint32_t sum = 0;
            for (int word = 0; word < 8; ++word) {
                const uint32_t a = of(row % 8 * 4 + word % 4)->a[word / 4 * 2 + row / 8];
                sum += __builtin_popcount(a & of(column * 4 + word % 4)->b[word / 4]);
            }
            int32_t& found = of(row % 8 * 4 + column / 2)->sums[row / 8 * 2 + column % 2];
            found = static_cast<int32_t>(static_cast<uint32_t>(found) + sum);
        }
    }
}

struct SparseMultiplication {
    uint32_t a[4], b[4], kept;
    int32_t sums[4];
};

// Stored byte k of a row has its index in group k / 2 of four columns; a group's smaller index
// comes first.
EMULATOR_TOGETHER inline void multiply_sparse_bytes(void* const* operands) {
    const auto of = [operands](int lane) {
        return static_cast<SparseMultiplication*>(operands[lane]);
    };
    for (int row = 0; row < 16; ++row) {
        for (int column = 0; column < 8; ++column) {
            int64_t sum = 0;
            for (int k = 0; k < 32; ++k) {
                const uint32_t kept = of(row % 8 * 4 + row / 8 + k / 16 * 2)->kept;
                const int index = k / 2 * 4 + (kept >> k % 16 * 2 & 3);
                sum += byte_of(of(row % 8 * 4 + k / 4 % 4)->a + row / 8, 2, k) *
                       byte_of(of(column * 4 + index / 4 % 4)->b, 1, index);
            }
            int32_t& found = of(row % 8 * 4 + column / 2)->sums[row / 8 * 2 + column % 2];
            found = static_cast<int32_t>(static_cast<uint32_t>(found) + static_cast<uint32_t>(sum));
        }
    }
}

// Value k of a fragment's row: half of word k / 8 of lane `4 * row + k / 2 % 4`.
inline double bfloat16_of(const uint32_t* words, int stride, int k) {
    const uint32_t bits = words[k / 8 * stride] >> 16 * (k % 2) << 16;
    float x;
    __builtin_memcpy(&x, &bits, 4);
    return x;
}

// A sum is rounded once; a GPU cuts off what lies far below the largest product.
EMULATOR_TOGETHER inline void multiply_bfloat16(void* const* operands) {
    const auto of = [operands](int lane) {
        return static_cast<Multiplication<float>*>(operands[lane]);
    };
    for (int row = 0; row < 16; ++row) {
        for (int column = 0; column < 8; ++column) {
            float& found = of(row % 8 * 4 + column / 2)->sums[row / 8 * 2 + column % 2];
            double sum = found;
            for (int k = 0; k < 16; ++k) {
                const int part = k / 2 % 4;
                sum += bfloat16_of(of(row % 8 * 4 + part)->a + row / 8, 2, k) *
                       bfloat16_of(of(column * 4 + part)->b, 1, k);
            }
            found = static_cast<float>(sum);
        }
    }
}

template <int MATRICES>
struct MatrixLoad {
    uint16_t row[8];
    uint32_t words[MATRICES];
};

template <int MATRICES, bool TRANSPOSED>
EMULATOR_TOGETHER void load_matrices(void* const* operands) {
    const auto of = [operands](int lane) {
        return static_cast<MatrixLoad<MATRICES>*>(operands[lane]);
    };
    for (int lane = 0; lane < WARP; ++lane) {
        const int group = lane / 4, part = lane % 4;
        for (int matrix = 0; matrix < MATRICES; ++matrix) {
            uint32_t word = 0;
            for (int half = 0; half < 2; ++half) {
                const int row = TRANSPOSED ? 2 * part + half : group,
                          column = TRANSPOSED ? group : 2 * part + half;
                word |= static_cast<uint32_t>(of(8 * matrix + row)->row[column]) << 16 * half;
            }
            of(lane)->words[matrix] = word;
        }
    }
}

template <class Sum>
EMULATOR_TOGETHER void together(void (*operation)(void* const*), Sum (&sums)[4],
                                const uint32_t (&a)[4], const uint32_t (&b)[2], Site site) {
    Multiplication<Sum> operands = {
        {a[0], a[1], a[2], a[3]}, {b[0], b[1]}, {sums[0], sums[1], sums[2], sums[3]}};
    emulator_together("mma.sync", operation, &operands, site);
    for (int i = 0; i < 4; ++i) sums[i] = operands.sums[i];
}

}  // namespace emulator

// mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32: sums [16, 8] += a [16, 32] times b [8, 32]
// transposed.
EMULATOR_TOGETHER inline void emulator_multiply(
    int32_t (&sums)[4], const uint32_t (&a)[4], const uint32_t (&b)[2],
    emulator::Site site = {__builtin_FILE(), __builtin_LINE()}) {
    emulator::together(emulator::multiply_bytes, sums, a, b, site);
}

// mma.sync.aligned.m16n8k256.row.col.s32.b1.b1.s32.and.popc: sums [16, 8] += the number of bits
// that a row of a [16, 256] and a row of b [8, 256] both have.
EMULATOR_TOGETHER inline void emulator_multiply_bits(
    int32_t (&sums)[4], const uint32_t (&a)[4], const uint32_t (&b)[2],
    emulator::Site site = {__builtin_FILE(), __builtin_LINE()}) {
    emulator::together(emulator::multiply_bits, sums, a, b, site);
}

// mma.sp::ordered_metadata.sync.aligned.m16n8k64.row.col.s32.s8.s8.s32: sums [16, 8] += a [16, 64],
// of which 32 columns are stored, times b [8, 64] transposed. Unordered indices end the launch.
EMULATOR_TOGETHER inline void emulator_multiply_sparse(
    int32_t (&sums)[4], const uint32_t (&a)[4], const uint32_t (&b)[4], uint32_t kept,
    emulator::Site site = {__builtin_FILE(), __builtin_LINE()}) {
    for (int group = 0; group < 8; ++group) {
        const uint32_t indices = kept >> 4 * group;
        if ((indices & 3) >= (indices >> 2 & 3)) emulator_unordered(indices & 15, site);
    }
    emulator::SparseMultiplication operands = {{a[0], a[1], a[2], a[3]},
                                               {b[0], b[1], b[2], b[3]},
                                               kept,
                                               {sums[0], sums[1], sums[2], sums[3]}};
    emulator_together("mma.sp", emulator::multiply_sparse_bytes, &operands, site);
    for (int i = 0; i < 4; ++i) sums[i] = operands.sums[i];
}

// mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32: sums [16, 8] += a [16, 16] times b [8, 16]
// transposed.
EMULATOR_TOGETHER inline void emulator_multiply(
    float (&sums)[4], const uint32_t (&a)[4], const uint32_t (&b)[2],
    emulator::Site site = {__builtin_FILE(), __builtin_LINE()}) {
    emulator::together(emulator::multiply_bfloat16, sums, a, b, site);
}

// cvt.rn.bf16x2.f32
__attribute__((noinline)) inline uint32_t emulator_bfloat16_pair(float low, float high) {
    return emulator_float_to_bfloat16(low) | static_cast<uint32_t>(emulator_float_to_bfloat16(high))
                                                 << 16;
}

// ldmatrix.sync.aligned.m8n8.x1, .x2 or .x4, perhaps .trans, .shared.b16: lane i names row i % 8 of
// matrix i / 8.
template <int MATRICES, bool TRANSPOSED>
EMULATOR_TOGETHER void emulator_load_matrices(const void* row, uint32_t (&words)[MATRICES],
                                              emulator::Site site = {__builtin_FILE(),
                                                                     __builtin_LINE()}) {
    emulator::MatrixLoad<MATRICES> operands = {};
    if (emulator_lane() < 8 * MATRICES) {
        constexpr size_t bytes = sizeof operands.row;
        if (reinterpret_cast<uintptr_t>(row) % bytes) emulator_misaligned(row, bytes, site);
        emulator_check_shared(row, bytes, "ldmatrix", site);
        emulator_read(row, bytes, __builtin_return_address(0));
        __builtin_memcpy(operands.row, row, bytes);
    }
    emulator_together("ldmatrix", emulator::load_matrices<MATRICES, TRANSPOSED>, &operands, site);
    for (int i = 0; i < MATRICES; ++i) words[i] = operands.words[i];
}

// cp.async.ca or .cg .shared.global: `bytes` from global to shared memory, or as many zeros.
EMULATOR_TOGETHER inline void emulator_copy_async(void* to, const void* from, size_t bytes,
                                                  bool zeros,
                                                  emulator::Site site = {__builtin_FILE(),
                                                                         __builtin_LINE()}) {
    emulator_copy(to, from, bytes, zeros, __builtin_return_address(0), site);
}

#define EMULATOR_HERE emulator::Site site = {__builtin_FILE(), __builtin_LINE()}
#define EMULATOR_NO_CALL __attribute__((always_inline)) inline

// wgmma.fence
EMULATOR_NO_CALL void emulator_fence_sums(EMULATOR_HERE) { emulator_fence_warpgroup(site); }

// wgmma.mma_async.m64nNk32.s32.s8.s8: sums [64, N] += a [64, 32] times b [N, 32] transposed, N = 8
// * TILES.
template <int TILES>
EMULATOR_NO_CALL void emulator_multiply_warpgroup(int32_t (&sums)[TILES][4], uint64_t a, uint64_t b,
                                                  EMULATOR_HERE) {
    emulator_begin_multiplication(sums[0], 8 * TILES, a, b, site);
}

// wgmma.commit_group
EMULATOR_NO_CALL void emulator_commit_warpgroup(EMULATOR_HERE) {
    emulator_commit_multiplications(site);
}

// wgmma.wait_group
EMULATOR_NO_CALL void emulator_wait_warpgroup(size_t groups, EMULATOR_HERE) {
    emulator_wait_multiplications(groups, site);
}

#undef EMULATOR_HERE
#undef EMULATOR_NO_CALL
