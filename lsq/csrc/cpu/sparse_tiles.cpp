// Packs weights that are 2:4 sparse, and goes through their blocks; sparse_kernels.cpp expands and
// multiplies these.
#include "sparse_tiles.h"

#include "rows.h"
#include "tile_kernels.h"
#include "tile_reader.h"

namespace lsq {

namespace {

constexpr int64_t kFewRows = 8;  // up to which registers hold all sums of a block

// A thread's strip of a as it is packed, and tiles as they are expanded.
struct Strip {
    Kept<int8_t> a, tiles;
};

Strip& kept() {
    static thread_local Strip strip;
    return strip;
}

int32_t* column_sums_of(const TileProduct& product) {
    return reinterpret_cast<int32_t*>(reinterpret_cast<SparseBlock*>(product.memory) +
                                      sparse_blocks(product.columns, product.inner));
}

// Half of a tile of units. -> whether each four holds two values at most
bool compress(const int8_t* units, SparseHalf& half) {
    bool fits = true;
    for (int64_t column = 0; column < kTileSide; ++column) {
        uint32_t all = 0;
        for (int64_t unit = 0; unit < kTileUnits / 2; ++unit) {
            const int8_t* four = units + unit * kTileInner + 4 * column;
            uint32_t bits = 0;
            for (int i = 0; i < 4; ++i) bits |= static_cast<uint32_t>(four[i] != 0) << i;
            fits &= __builtin_popcount(bits) <= 2;
            // Zeros are kept, too.
            for (uint32_t next = 1; __builtin_popcount(bits) < 2; next <<= 1) bits |= next;
            int8_t* to = half.values[unit / 2][column][unit % 2];
            for (int i = 0, value = 0; i < 4 && value < 2; ++i) {
                if (bits >> i & 1) to[value++] = four[i];
            }
            all |= bits << 4 * unit;
        }
        half.kept[column] = all;
    }
    return fits;
}

}  // namespace

SparseMultiplier::SparseMultiplier(const TileProduct& product)
    : product_(product), blocks_(reinterpret_cast<const SparseBlock*>(product.memory)),
      columns_(column_sums_of(product)), a_{}, depth_(inner_tiles(product.inner)), rows_(0),
      kernel_(nullptr) {
#if defined(LSQ_AMX)
    if (product.instructions == Instructions::amx) tiles_.emplace();
#endif
}

void SparseMultiplier::take(int64_t first, int64_t count) {
    const Codes& codes = product_.a;
    rows_ = count;
    kernel_ = count <= kFewRows && product_.instructions != Instructions::plain ? sparse_kernel()
                                                                                : nullptr;
    const bool is_biased = kernel_ || biased(product_.instructions);
    if (!is_biased && count == height() && product_.inner % kTileInner == 0) {
        a_ = {codes.data + first * codes.stride, codes.stride, kTileInner,
              kTileSide * codes.stride};
        return;
    }
    int8_t* tiles = kept().a.at_least(height() * depth_ * kTileInner);
    a_ = {tiles, kTileInner, kTileBytes, depth_ * kTileBytes};
    TileReader(codes, product_.inner)
        .rows(first, count, tiles, a_.block, [&](int64_t, int8_t* tile) {
            if (!is_biased) return;
#pragma omp simd
            for (int64_t i = 0; i < kTileBytes; ++i) tile[i] = static_cast<int8_t>(tile[i] ^ 0x80);
        });
}

void SparseMultiplier::multiply(int64_t begin, int64_t end, int32_t* sums, int64_t stride) const {
    if (!kernel_) {
        multiply_expanded(product_, a_, rows_, blocks_, columns_, kept().tiles, begin, end, sums,
                          stride);
        return;
    }
    const SparseBlock* blocks = blocks_ + begin / kTilePair * depth_;
    for (int64_t column = begin; column < end;
         column += kTilePair, blocks += depth_, sums += kTilePair) {
        kernel_(a_, rows_, blocks, depth_, columns_ + column, sums, stride);
    }
}

}  // namespace lsq

using namespace lsq;

// Packs b. -> to fits[0], whether each four of its codes holds two values at most; else what is
// packed means nothing.
LSQ_EXPORT void lsq_pack_sparse(const TileProduct& product, int64_t* fits) {
    const int64_t depth = inner_tiles(product.inner);
    auto* blocks = reinterpret_cast<SparseBlock*>(product.memory);
    bool all = true;
#pragma omp parallel for schedule(static) reduction(&& : all)
    for (int64_t group = 0; group < groups_of_columns(product); ++group) {
        const int64_t first = group * kTileGroup,
                      rows = std::min(kTileGroup, product.columns - first);
        const int64_t distance = depth * kTileBytes;
        int32_t* sums = column_sums_of(product) + first;
        std::fill(sums, sums + rounded_up(rows, kTilePair), 0);
        int8_t* tiles = kept().tiles.at_least(kTileGroup / kTileSide * distance);
        TileReader(product.b, product.inner)
            .units(first, rows, tiles, distance, [&](int64_t i, const int8_t* tile) {
                const int64_t k = (tile - tiles - i * distance) / kTileBytes,
                              pair = first / kTilePair + i / 2;
                for (int half = 0; half < 2; ++half) {
                    all &= compress(tile + half * kTileBytes / 2,
                                    blocks[pair * depth + k].halves[i % 2][half]);
                }
                add_column_sums(tile, sums + i * kTileSide);
            });
    }
    *fits = all;
}
