// Sums of groups in registers, or in AMX's tiles, scaled and added up as floats.
#include "grouped_kernels.h"

#include <cstring>

#include "lanes.h"

namespace lsq {

namespace {

void multiply_plain(const GroupedRows& a, const int8_t* blocks, int64_t groups, int64_t group,
                    float* sums) {
    std::memset(sums, 0, a.rows * kTilePair * sizeof(float));
    for (int64_t g = 0; g < groups; ++g, blocks += grouped_block_bytes(group)) {
        const GroupedBlock block(blocks, group);
        for (int64_t row = 0; row < a.rows; ++row) {
            const int8_t* codes = a.data + row * a.stride + g * group;
            const float factor = a.scale[row * a.steps.row + g * a.steps.group];
            for (int64_t half = 0; half < 2; ++half) {
                const int8_t* tile = blocks + half * group * kTileSide;
                int32_t sum[kTileSide] = {};
                for (int64_t i = 0; i < group; ++i) {
                    const int8_t* unit = tile + i / 4 * kTileInner + i % 4;
                    for (int64_t n = 0; n < kTileSide; ++n) sum[n] += codes[i] * unit[4 * n];
                }
                const float* scale = block.scale + half * kTileSide;
                float* out = sums + row * kTilePair + half * kTileSide;
                for (int64_t n = 0; n < kTileSide; ++n) {
                    out[n] = multiply_add(static_cast<float>(sum[n]), factor * scale[n], out[n]);
                }
            }
        }
    }
}

#if defined(__AVX2__) && defined(__x86_64__)
#define LSQ_GROUPED_VNNI

// Whether a vector holds a tile's columns, or half of them.
constexpr int64_t kWhole = kLanes == kTileSide;
// Whose sums, of integers and of floats, registers hold.
constexpr int kVnniRows = kWhole ? 6 : 3;
constexpr int kPasses = kTilePair / (2 * kLanes);            // of two vectors of columns each
constexpr Instructions kVnni = kWhole ? Instructions::avx512_vnni : Instructions::avx_vnni;

LaneWords load_words(const void* from) { return *static_cast<const LaneWords*>(from); }

// By hand: from its intrinsic the compiler (GCC 12) copies every sum before and after it.
void add_products(LaneWords& sum, LaneWords bytes, LaneWords codes) {
#if defined(__AVX512F__)
    asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(bytes), "v"(codes));
#else
    asm("%{vex%} vpdpbusd %2, %1, %0" : "+x"(sum) : "x"(bytes), "x"(codes));
#endif
}

// ROWS rows from `row` on, and two vectors of columns.
template <int ROWS>
__attribute__((noinline)) void multiply_rows(const GroupedRows& a, int64_t row,
                                             const int8_t* blocks, int64_t groups, int64_t group,
                                             int pass, float* sums) {
    const int64_t tile = group * kTileSide, column = pass * 2 * kLanes;
    const int64_t first = pass * tile,
                  second = kWhole ? tile : first + static_cast<int64_t>(sizeof(LaneWords));
    const int8_t* codes = a.data + row * a.stride;
    const float* scale = a.scale + row * a.steps.row;
    Lanes total[ROWS][2] = {};
    for (int64_t g = 0; g < groups; ++g, blocks += grouped_block_bytes(group), codes += group) {
        const GroupedBlock block(blocks, group);
        LaneWords sum[ROWS][2];
#pragma GCC unroll 8
        for (int i = 0; i < ROWS; ++i) {
            sum[i][0] = load_words(block.starts + column);
            sum[i][1] = load_words(block.starts + column + kLanes);
        }
        const int8_t *left = blocks + first, *right = blocks + second;
        for (int64_t at = 0; at < group; at += 4, left += kTileInner, right += kTileInner) {
            const LaneWords low = load_words(left), high = load_words(right);
#pragma GCC unroll 8
            for (int i = 0; i < ROWS; ++i) {
                int32_t four;
                std::memcpy(&four, codes + i * a.stride + at, 4);
                const LaneWords factor = four - LaneWords{};
                add_products(sum[i][0], factor, low);
                add_products(sum[i][1], factor, high);
            }
        }
        const Lanes low = lanes_at(block.scale + column),
                    high = lanes_at(block.scale + column + kLanes);
#pragma GCC unroll 8
        for (int i = 0; i < ROWS; ++i) {
            const Lanes factor = all_lanes(scale[i * a.steps.row + g * a.steps.group]);
            total[i][0] =
                multiply_add(__builtin_convertvector(sum[i][0], Lanes), factor * low, total[i][0]);
            total[i][1] =
                multiply_add(__builtin_convertvector(sum[i][1], Lanes), factor * high, total[i][1]);
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < ROWS; ++i) {
        lanes_at(sums + (row + i) * kTilePair + column) = total[i][0];
        lanes_at(sums + (row + i) * kTilePair + column + kLanes) = total[i][1];
    }
}

// The rows that are left when those before were taken kRows at a time.
template <int ROWS>
void multiply_rest(const GroupedRows& a, int64_t row, const int8_t* blocks, int64_t groups,
                   int64_t group, int pass, float* sums) {
    if constexpr (ROWS > 0) {
        if (a.rows - row == ROWS)
            return multiply_rows<ROWS>(a, row, blocks, groups, group, pass, sums);
        multiply_rest<ROWS - 1>(a, row, blocks, groups, group, pass, sums);
    }
}

void multiply_vnni(const GroupedRows& a, const int8_t* blocks, int64_t groups, int64_t group,
                   float* sums) {
    for (int pass = 0; pass < kPasses; ++pass) {
        int64_t row = 0;
        for (; row + kVnniRows <= a.rows; row += kVnniRows) {
            multiply_rows<kVnniRows>(a, row, blocks, groups, group, pass, sums);
        }
        multiply_rest<kVnniRows - 1>(a, row, blocks, groups, group, pass, sums);
    }
}

#endif
#if defined(LSQ_AMX)

// Up to 32 rows; groups are whole tiles. Sixteen rows are read at a time, whatever stands beyond
// the last one.
void multiply_amx(const GroupedRows& a, const int8_t* blocks, int64_t groups, int64_t group,
                  float* sums) {
    alignas(64) int32_t tiles[kTilePair][kTilePair];
    constexpr int64_t kBytes = kTilePair * sizeof(int32_t);
    const bool both = a.rows > kTileSide;
    const int8_t *upper = a.data, *lower = upper + (both ? kTileSide * a.stride : 0);
    std::memset(sums, 0, a.rows * kTilePair * sizeof(float));
    for (int64_t g = 0; g < groups; ++g, blocks += grouped_block_bytes(group)) {
        const GroupedBlock block(blocks, group);
        zero_tile<0>(), zero_tile<1>(), zero_tile<2>(), zero_tile<3>();
        for (int64_t at = 0; at < group;
             at += kTileInner, upper += kTileInner, lower += kTileInner) {
            const int8_t* left = blocks + at * kTileSide;
            load_tile<4>(upper, a.stride), load_tile<6>(left, kTileInner);
            multiply_int8<0, 4, 6>();
            load_tile<7>(left + group * kTileSide, kTileInner);
            multiply_int8<1, 4, 7>();
            if (!both) continue;
            load_tile<5>(lower, a.stride);
            multiply_int8<2, 5, 6>(), multiply_int8<3, 5, 7>();
        }
        store_tile<0>(tiles[0], kBytes), store_tile<1>(tiles[0] + kTileSide, kBytes);
        if (both)
            store_tile<2>(tiles[kTileSide], kBytes),
                store_tile<3>(tiles[kTileSide] + kTileSide, kBytes);
        const Lanes low = lanes_at(block.scale), high = lanes_at(block.scale + kTileSide);
        const float* scale = a.scale + g * a.steps.group;
        for (int64_t row = 0; row < a.rows; ++row, scale += a.steps.row) {
            float* out = sums + row * kTilePair;
            const Lanes factor = all_lanes(*scale);
            const auto add = [&](int64_t column, Lanes of_columns) {
                const Lanes sum = __builtin_convertvector(
                    *reinterpret_cast<LaneWords*>(tiles[row] + column), Lanes);
                lanes_at(out + column) =
                    multiply_add(sum, factor * of_columns, lanes_at(out + column));
            };
            add(0, low), add(kTileSide, high);
        }
    }
}

#endif

}  // namespace

GroupedKernel grouped_kernel_of([[maybe_unused]] Instructions instructions,
                                [[maybe_unused]] int64_t group, [[maybe_unused]] bool few_rows) {
#if defined(LSQ_AMX)
    const bool tiles = group % kTileInner == 0 && !(few_rows && usable(Instructions::avx512_vnni));
    if (instructions == Instructions::amx && tiles) return {multiply_amx, kTilePair, 0, true};
#endif
#if defined(LSQ_GROUPED_VNNI)
    if (instructions != Instructions::plain && usable(kVnni)) {
        return {multiply_vnni, kTilePair / kVnniRows * kVnniRows, 128, false};
    }
#endif
    return {multiply_plain, kTilePair, 0, false};
}

}  // namespace lsq
