// Packs weights of 4 bits, and goes through their blocks; int4_kernels.cpp multiplies and unpacks
// these.
#include "int4_tiles.h"

#include <algorithm>
#include <cstring>

#include "rows.h"
#include "tile_kernels.h"
#include "tile_reader.h"

namespace lsq {

namespace {

#if defined(LSQ_AMX)
constexpr int64_t kRing = 4;  // tiles along K that are unpacked at a time where they are read once
#endif

// A thread's strip of a as it is packed, what its groups add up to, and two columns of tiles.
struct Strip {
    Kept<int8_t> a, tiles;
    Kept<Int4Start> starts;
};

Strip& kept() {
    static thread_local Strip strip;
    return strip;
}

// Inner elements [64 k, 64 k + 64) of 32 columns, those beyond the last one 0.
void pack_block(const Int4Group* groups, int64_t stride, int64_t columns, int64_t count,
                Int4Block& block) {
    std::memset(&block, 0, sizeof block);
    std::memset(block.pairs, 0x88, sizeof block.pairs);  // zeros
    for (int64_t column = 0; column < columns; ++column, groups += stride) {
        const int64_t tile = column / kTileSide, place = column % kTileSide;
        for (int64_t part = 0; part < count; ++part) {
            const Int4Group& group = groups[part];
            block.multipliers[tile][place][part] = group.multiplier;
            const int shift = part ? 4 : 0;
            for (int64_t i = 0; i < kInt4Group; ++i) {
                const int pair = group.pairs[i % (kInt4Group / 2)];
                const int code =
                    ((i < kInt4Group / 2 ? pair : pair >> 4) & 15) ^ (group.multiplier < 0 ? 7 : 8);
                uint8_t& to = block.pairs[tile][i / 4][4 * place + i % 4];
                to = static_cast<uint8_t>((to & ~(15 << shift)) | code << shift);
            }
        }
    }
}

int32_t* column_sums_of(Int4Block* blocks, int64_t columns, int64_t inner) {
    return reinterpret_cast<int32_t*>(blocks + int4_blocks(columns, inner));
}

}  // namespace

Int4Multiplier::Int4Multiplier(const TileProduct& product)
    : product_(product), blocks_(reinterpret_cast<const Int4Block*>(product.memory)),
      columns_(column_sums_of(reinterpret_cast<Int4Block*>(product.memory), product.columns,
                              product.inner)),
      a_{}, depth_(inner_tiles(product.inner)), rows_(0), height_(0), few_(true) {
#if defined(LSQ_AMX)
    if (product.instructions == Instructions::amx) tiles_.emplace();
#endif
}

void Int4Multiplier::take(int64_t first, int64_t count) {
    const Codes& codes = product_.a;
    rows_ = count;
    few_ = count <= int4_rows(product_.instructions);
    height_ = few_ ? count : rounded_up(count, kTilePair);
    const int8_t flipped = !few_ && biased(product_.instructions) ? -128 : 0;
    if (!flipped && product_.inner % kTileInner == 0 && count == height_) {
        a_ = {codes.data + first * codes.stride, codes.stride, kTileInner,
              kTileSide * codes.stride};
    } else {
        int8_t* tiles = kept().a.at_least(rounded_up(count, kTilePair) * depth_ * kTileInner);
        a_ = {tiles, depth_ * kTileInner, kTileInner, kTileSide * depth_ * kTileInner};
        for (int64_t row = 0; row < count; ++row) {
            int8_t* to = tiles + row * a_.stride;
            const int8_t* from = codes.data + (first + row) * codes.stride;
#pragma omp simd
            for (int64_t i = 0; i < product_.inner; ++i) to[i] = from[i] ^ flipped;
            std::memset(to + product_.inner, 0, a_.stride - product_.inner);
        }
    }
    if (few_) take_sums();
}

void Int4Multiplier::take_sums() {
    Int4Start* starts = kept().starts.at_least(rows_ * depth_);
    for (int64_t row = 0; row < rows_; ++row) {
        const int8_t* codes = a_.data + row * a_.stride;
        for (int64_t k = 0; k < depth_; ++k, codes += kTileInner) {
            int16_t sums[2] = {};
            for (int64_t part = 0; part < 2; ++part) {
                for (int64_t i = 0; i < kInt4Group; ++i) sums[part] += codes[part * kInt4Group + i];
            }
            starts[row * depth_ + k] = {-8 * sums[0], -128 * sums[1], {sums[0], sums[1]}};
        }
    }
}

void Int4Multiplier::multiply(int64_t begin, int64_t end, int32_t* sums, int64_t stride) const {
    const Int4Block* blocks = blocks_ + begin / kTilePair * depth_;
    if (few_) {
        const Int4Kernel kernel = int4_kernel_of(product_.instructions);
        const Int4Rows a{a_.data, a_.stride, a_.step, kept().starts.at_least(0)};
        for (int64_t column = begin; column < end; column += kTilePair, blocks += depth_) {
            kernel(a, rows_, blocks, depth_, sums + column - begin, stride);
        }
        return;
    }
    if (product_.instructions != Instructions::amx) {
        multiply_expanded(product_, a_, rows_, blocks_, columns_, kept().tiles, begin, end, sums,
                          stride);
        return;
    }
#if defined(LSQ_AMX)
    const Kernel kernel = kernel_of(product_.instructions);
    constexpr int32_t kNoSums[kTilePair] = {};
    const int64_t depth = rows_ <= kTilePair ? std::min(kRing, depth_) : depth_;
    const Int4Tiles tiles{kept().tiles.at_least(2 * depth * kTileBytes), depth};
    const PairOfColumns pair{tiles.data, depth * kTileBytes, depth, kNoSums, 0};
    for (int64_t column = begin; column < end;
         column += kTilePair, blocks += depth_, sums += kTilePair) {
        multiply_unpacked(a_, rows_, blocks, depth_, tiles, sums, stride);
        for (int64_t row = kTilePair; row < rows_; row += kTilePair) {
            const TileRows a{a_.data + row / kTileSide * a_.block, a_.stride, a_.step, a_.block};
            kernel(a, pair, sums + row * stride, stride, std::min(kTilePair, rows_ - row));
        }
    }
#endif
}

}  // namespace lsq

using namespace lsq;

// Packs a weight of so many columns and inner elements, as the format stores it, into int4_blocks
// and their sums.
LSQ_EXPORT void lsq_pack_int4(const int8_t* stored, int64_t columns, int64_t inner,
                              Int4Block* blocks) {
    const Int4Group* groups = reinterpret_cast<const Int4Group*>(stored);
    const int64_t stride = (inner + kInt4Group - 1) / kInt4Group, depth = inner_tiles(inner);
#pragma omp parallel for schedule(static)
    for (int64_t first = 0; first < columns; first += kTilePair) {
        int32_t* sums = column_sums_of(blocks, columns, inner) + first;
        std::fill(sums, sums + kTilePair, 0);
        for (int64_t k = 0; k < depth; ++k) {
            Int4Block& block = blocks[first / kTilePair * depth + k];
            pack_block(groups + first * stride + 2 * k, stride,
                       std::min(kTilePair, columns - first), std::min<int64_t>(2, stride - 2 * k),
                       block);
            alignas(64) int8_t tiles[2 * kTileBytes];
            unpack(block, tiles, kTileBytes);
            for (int64_t tile = 0; tile < 2; ++tile)
                add_column_sums(tiles + tile * kTileBytes, sums + tile * kTileSide);
        }
    }
}

// For tests.
LSQ_EXPORT int64_t lsq_int4_rows(int64_t instructions) {
    return int4_rows(static_cast<Instructions>(instructions));
}
