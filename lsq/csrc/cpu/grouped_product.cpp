// Products of int8 codes whose scales belong to groups along K (lsq/ops/grouped_product.py).
//
// b is packed by pairs of 16 columns and by groups: a block has the group's codes as tiles [group /
// 4][16][4], -128 times the sum of each of its 32 columns, and their scales. Rows of a are copied,
// filled up to whole groups with zeros; VNNI takes them with 128 added, so that sums begin at those
// of the block. All but plain C++ add up alike, bit by bit.
#include <omp.h>

#include <algorithm>
#include <optional>

#include "lanes.h"
#include "rows.h"
#include "tiles.h"

using namespace lsq;

namespace {

// Strides of scales by row and group; 0 where they share it.
struct ScaleSteps {
    int64_t row, group;
};

inline int64_t grouped_block_bytes(int64_t group) { return kTilePair * (group + 8); }

// Sums and scales behind the codes of a block.
struct GroupedBlock {
    const int32_t* starts;  // [32], -128 times the sum of a column
    const float* scale;     // [32]

    GroupedBlock(const int8_t* block, int64_t group)
        : starts(reinterpret_cast<const int32_t*>(block + kTilePair * group)),
          scale(reinterpret_cast<const float*>(starts + kTilePair)) {}
};

// Rows of codes `stride` apart, whole groups long, with their scales.
struct GroupedRows {
    const int8_t* data;
    int64_t stride, rows;
    const float* scale;
    ScaleSteps steps;
};

struct GroupedKernel {
    // sums [rows, 32], 32 apart, of the groups of a pair of tiles of columns.
    void (*multiply)(const GroupedRows& a, const int8_t* blocks, int64_t groups, int64_t group,
                     float* sums);
    int64_t rows;  // most at a time, at most 32
    uint8_t bias;  // that rows have added to their codes
    bool amx;
};

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

// A vector holds a tile's columns, or half of them.
constexpr int64_t kWhole = kLanes == kTileSide;
// Rows whose sums of integers and floats fit into registers.
constexpr int kVnniRows = kWhole ? 6 : 3;
constexpr int kPasses = kTilePair / (2 * kLanes);  // of two vectors of columns each
constexpr Instructions kVnni = kWhole ? Instructions::avx512_vnni : Instructions::avx_vnni;

LaneWords load_words(const void* from) { return *static_cast<const LaneWords*>(from); }

// Multiplies ROWS rows from `row` on with two vectors of columns.
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

// The last rows, fewer than kVnniRows.
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

// Up to 32 rows; groups are whole tiles. Reads sixteen rows at a time, also beyond the last one.
void multiply_amx(const GroupedRows& a, const int8_t* blocks, int64_t groups, int64_t group,
                  float* sums) {
    alignas(64) int32_t tiles[kTilePair][kTilePair];
    constexpr int64_t kBytes = kTilePair * sizeof(int32_t);
    const bool both = a.rows > kTileSide;
    const int8_t *upper = a.data, *lower = upper + (both ? kTileSide * a.stride : 0);
    std::memset(sums, 0, a.rows * kTilePair * sizeof(float));
    for (int64_t g = 0; g < groups; ++g, blocks += grouped_block_bytes(group)) {
        const GroupedBlock block(blocks, group);
        zero_sums();
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
        store_sums(tiles, kBytes, both);
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

// The fastest kernel of these instructions.
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

constexpr int64_t kChunkBytes = 512 << 10;  // of b, which stay in the second cache meanwhile
constexpr int64_t kFewRows = 8;             // fewer waste AMX's tiles

struct Sizes {
    // Depth: bytes of a row of a; block: of a group of 32 columns.
    int64_t groups, depth, block, pairs;

    Sizes(int64_t columns, int64_t inner, int64_t group)
        : groups((inner + group - 1) / group), depth(groups * group),
          block(grouped_block_bytes(group)), pairs((columns + kTilePair - 1) / kTilePair) {}

    static ScaleSteps steps(const GroupedCodes& codes) {
        return {codes.scale_rows > 1 ? codes.scale_columns : 0, codes.scale_columns > 1 ? 1 : 0};
    }
};

// Columns [32 * pair, + 32) of `columns`.
void pack_pair(const GroupedCodes& b, int64_t columns, const Sizes& sizes, int64_t pair,
               int8_t* to) {
    const ScaleSteps steps = Sizes::steps(b);
    const int64_t group = b.group, first = pair * kTilePair,
                  count = std::min(kTilePair, columns - first);
    for (int64_t g = 0; g < sizes.groups; ++g, to += sizes.block) {
        int32_t* starts = reinterpret_cast<int32_t*>(to + kTilePair * group);
        float* scale = reinterpret_cast<float*>(starts + kTilePair);
        const int64_t begin = g * group, there = std::min(group, b.columns - begin);
        for (int64_t column = 0; column < kTilePair; ++column) {
            int8_t* out = to + column / kTileSide * group * kTileSide + column % kTileSide * 4;
            const int8_t* codes = b.codes + (first + column) * b.columns + begin;
            const int64_t whole = column < count ? there / 4 * 4 : 0;
            int32_t sum = 0;
            for (int64_t i = 0; i < whole; i += 4) {
                std::memcpy(out + i / 4 * kTileInner, codes + i, 4);
                sum += codes[i] + codes[i + 1] + codes[i + 2] + codes[i + 3];
            }
            for (int64_t i = whole; i < group; ++i) {
                const int8_t code = column < count && i < there ? codes[i] : 0;
                out[i / 4 * kTileInner + i % 4] = code;
                sum += code;
            }
            starts[column] = -128 * sum;
            scale[column] =
                column < count ? b.scale[(first + column) * steps.row + g * steps.group] : 0.0f;
        }
    }
}

// Copies a row of a with `bias` added modulo 256.
void copy_row(const int8_t* codes, int64_t inner, const Sizes& sizes, uint8_t bias, int8_t* to) {
#pragma omp simd
    for (int64_t i = 0; i < inner; ++i)
        to[i] = static_cast<int8_t>(static_cast<uint8_t>(codes[i]) ^ bias);
    std::memset(to + inner, bias, sizes.depth - inner);
}

// out [M, N] = `all` rows of codes of `inner` values, times packed columns.
struct Factors {
    const GroupedCodes& a;
    int64_t all, columns, inner;
    const int8_t* packed;
    float* out;
};

// `rows`: for the copies of a's rows, aligned to 64 bytes as the packed columns are.
void multiply(const Factors& op, int8_t* rows, int64_t instructions) {
    const Sizes sizes(op.columns, op.inner, op.a.group);
    const GroupedKernel kernel =
        grouped_kernel_of(static_cast<Instructions>(instructions), op.a.group, op.all <= kFewRows);
    const int64_t bytes = sizes.groups * sizes.block, threads = omp_get_max_threads();
    const int64_t most = std::max<int64_t>(1, kChunkBytes / bytes),
                  share = (sizes.pairs + threads - 1) / threads;
    const int64_t chunk = std::min(most, share), chunks = (sizes.pairs + chunk - 1) / chunk;
    const int64_t strips = (op.all + kernel.rows - 1) / kernel.rows;
    const ScaleSteps steps = Sizes::steps(op.a);
#pragma omp parallel
    {
        const TileSession session(kernel.amx ? Instructions::amx : Instructions::plain);
        alignas(64) float sums[kTilePair][kTilePair];
#pragma omp for schedule(static)
        for (int64_t row = 0; row < op.all; ++row) {
            copy_row(op.a.codes + row * op.inner, op.inner, sizes, kernel.bias,
                     rows + row * sizes.depth);
        }
#pragma omp for collapse(2) schedule(static)
        for (int64_t part = 0; part < chunks; ++part) {
            for (int64_t strip = 0; strip < strips; ++strip) {
                const int64_t first = strip * kernel.rows,
                              count = std::min(kernel.rows, op.all - first);
                const GroupedRows a{rows + first * sizes.depth, sizes.depth, count,
                                    op.a.scale + first * steps.row, steps};
                for (int64_t pair = part * chunk; pair < std::min(sizes.pairs, (part + 1) * chunk);
                     ++pair) {
                    kernel.multiply(a, op.packed + pair * bytes, sizes.groups, op.a.group, sums[0]);
                    const int64_t column = pair * kTilePair,
                                  width = std::min(kTilePair, op.columns - column);
                    for (int64_t row = 0; row < count; ++row) {
                        std::memcpy(op.out + (first + row) * op.columns + column, sums[row],
                                    width * sizeof(float));
                    }
                }
            }
        }
    }
}

}  // namespace

LSQ_EXPORT void lsq_pack_grouped(const GroupedCodes& b, int64_t columns, int8_t* packed) {
    const Sizes sizes(columns, b.columns, b.group);
    const int64_t bytes = sizes.groups * sizes.block;
#pragma omp parallel for schedule(static)
    for (int64_t pair = 0; pair < sizes.pairs; ++pair)
        pack_pair(b, columns, sizes, pair, packed + pair * bytes);
}

// A projection without its epilogue.
LSQ_EXPORT void lsq_multiply_groups(const Project& op, const int8_t* packed, int8_t* rows,
                                    int64_t instructions) {
    multiply({op.groups, op.rows, op.columns, op.groups.columns, packed, op.out}, rows,
             instructions);
}
