// Products of int8 codes whose scales belong to groups along K; lsq/ops/grouped_product.py is the reference.
//
// b is packed by pairs of 16 columns and by groups: a block has the group's codes as tiles [group / 4][16][4], -128 times
// the sum of each of its 32 columns, and their scales. Rows of a are copied, filled up to whole groups with zeros; VNNI
// takes them with 128 added, so that sums begin at those of the block. All but plain C++ add up alike, bit by bit.
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
    int64_t groups, depth, block, pairs;  // depth: bytes of a row of a; block: of a group of 32 columns

    explicit Sizes(const GroupedProduct& op)
        : groups((op.inner + op.b.group - 1) / op.b.group), depth(groups * op.b.group),
          block(grouped_block_bytes(op.b.group)), pairs((op.columns + kTilePair - 1) / kTilePair) {}

    // Of the scales of codes, by row and by group.
    static ScaleSteps steps(const GroupedCodes& codes) {
        return {codes.scale_rows > 1 ? codes.scale_columns : 0, codes.scale_columns > 1 ? 1 : 0};
    }
};

// Columns [32 * pair, + 32).
void pack_pair(const GroupedProduct& op, const Sizes& sizes, int64_t pair, int8_t* to) {
    const ScaleSteps steps = Sizes::steps(op.b);
    const int64_t group = op.b.group, first = pair * kTilePair, count = std::min(kTilePair, op.columns - first);
    for (int64_t g = 0; g < sizes.groups; ++g, to += sizes.block) {
        int32_t* starts = reinterpret_cast<int32_t*>(to + kTilePair * group);
        float* scale = reinterpret_cast<float*>(starts + kTilePair);
        const int64_t begin = g * group, there = std::min(group, op.inner - begin);
        for (int64_t column = 0; column < kTilePair; ++column) {
            int8_t* out = to + column / kTileSide * group * kTileSide + column % kTileSide * 4;
            const int8_t* codes = op.b.codes + (first + column) * op.inner + begin;
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
            scale[column] = column < count ? op.b.scale[(first + column) * steps.row + g * steps.group] : 0.0f;
        }
    }
}

// Row `row` of a, with `bias` added modulo 256.
void copy_row(const GroupedProduct& op, const Sizes& sizes, int64_t row, uint8_t bias, int8_t* to) {
    const int8_t* codes = op.a.codes + row * op.inner;
#pragma omp simd
    for (int64_t i = 0; i < op.inner; ++i) to[i] = static_cast<int8_t>(static_cast<uint8_t>(codes[i]) ^ bias);
    std::memset(to + op.inner, bias, sizes.depth - op.inner);
}

}  // namespace

LSQ_EXPORT void lsq_pack_grouped(const GroupedProduct& op, int8_t* packed) {
    const Sizes sizes(op);
    const int64_t bytes = sizes.groups * sizes.block;
#pragma omp parallel for schedule(static)
    for (int64_t pair = 0; pair < sizes.pairs; ++pair) pack_pair(op, sizes, pair, packed + pair * bytes);
}

// `packed`: b; `rows`: for the copies of a's rows. Both are aligned to 64 bytes.
LSQ_EXPORT void lsq_multiply_grouped(const GroupedProduct& op, const int8_t* packed, int8_t* rows, int64_t instructions) {
    const Sizes sizes(op);
    const GroupedKernel kernel = grouped_kernel_of(static_cast<Instructions>(instructions), op.b.group, op.rows <= kFewRows);
    const int64_t bytes = sizes.groups * sizes.block, threads = omp_get_max_threads();
    const int64_t most = std::max<int64_t>(1, kChunkBytes / bytes), share = (sizes.pairs + threads - 1) / threads;
    const int64_t chunk = std::min(most, share), chunks = (sizes.pairs + chunk - 1) / chunk;
    const int64_t strips = (op.rows + kernel.rows - 1) / kernel.rows;
    const ScaleSteps steps = Sizes::steps(op.a);
#pragma omp parallel
    {
        [[maybe_unused]] const GroupedSession session(kernel);
        alignas(64) float sums[kTilePair][kTilePair];
#pragma omp for schedule(static)
        for (int64_t row = 0; row < op.rows; ++row) copy_row(op, sizes, row, kernel.bias, rows + row * sizes.depth);
#pragma omp for collapse(2) schedule(static)
        for (int64_t part = 0; part < chunks; ++part) {
            for (int64_t strip = 0; strip < strips; ++strip) {
                const int64_t first = strip * kernel.rows, count = std::min(kernel.rows, op.rows - first);
                const GroupedRows a{rows + first * sizes.depth, sizes.depth, count, op.a.scale + first * steps.row, steps};
                for (int64_t pair = part * chunk; pair < std::min(sizes.pairs, (part + 1) * chunk); ++pair) {
                    kernel.multiply(a, packed + pair * bytes, sizes.groups, op.b.group, sums[0]);
                    const int64_t column = pair * kTilePair, width = std::min(kTilePair, op.columns - column);
                    for (int64_t row = 0; row < count; ++row) {
                        std::memcpy(op.out + (first + row) * op.columns + column, sums[row], width * sizeof(float));
                    }
                }
            }
        }
    }
}
