// Products of int8 codes whose scales belong to groups along K (lsq/ops/grouped_product.py).
//
// b is packed by pairs of 16 columns and by groups: a block has the group's codes as tiles [group /
// 4][16][4], -128 times the sum of each of its 32 columns, and their scales. Rows of a are copied,
// filled up to whole groups with zeros; VNNI takes them with 128 added, so that sums begin at those
// of the block. All but plain C++ add up alike, bit by bit.
#include <omp.h>

#include <algorithm>

#include "amx.h"
#include "grouped_kernels.h"
#include "rows.h"

using namespace lsq;

namespace {

constexpr int64_t kChunkBytes = 512 << 10;  // of b, which stay in the second cache meanwhile
constexpr int64_t kFewRows = 8;             // fewer waste AMX's tiles

struct Sizes {
    // Depth: bytes of a row of a; block: of a group of 32 columns.
    int64_t groups, depth, block, pairs;

    Sizes(int64_t columns, int64_t inner, int64_t group)
        : groups((inner + group - 1) / group), depth(groups * group),
          block(grouped_block_bytes(group)), pairs((columns + kTilePair - 1) / kTilePair) {}

    // Of the scales of codes, by row and by group.
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

// A row of a, with `bias` added modulo 256.
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
        [[maybe_unused]] const GroupedSession session(kernel);
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

// Of a projection without its epilogue.
LSQ_EXPORT void lsq_multiply_groups(const Project& op, const int8_t* packed, int8_t* rows,
                                    int64_t instructions) {
    multiply({op.groups, op.rows, op.columns, op.groups.columns, packed, op.out}, rows,
             instructions);
}
