// Packs weights of 4 bits, multiplies and unpacks their blocks.
//
// VNNI multiplies unsigned with signed codes, as 4-bit codes are with 8 added: sums begin at -8
// times that of a's codes. The upper half of a byte needs no shift, since 16 times a code fits a
// byte as well.
#include "int4_tiles.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "lanes.h"
#include "rows.h"
#include "tile_kernels.h"
#include "tile_reader.h"

namespace lsq {

namespace {

// Initial sums of a row and a block.
struct Int4Start {
    // -8 times the sum of its first 32 codes, and -128 times that of the others.
    int32_t first, second;
    int16_t sums[2];  // these

    uint32_t both() const {
        return static_cast<uint16_t>(sums[0]) | static_cast<uint32_t>(sums[1]) << 16;
    }
};

// Few rows of codes: tiles along K are `step` bytes apart.
struct Int4Rows {
    const int8_t* data;
    int64_t stride, step;
    const Int4Start* starts;  // [rows, depth]
};

// sums [rows, 32], `stride` apart, over `depth` blocks along K.
using Int4Kernel = void (*)(const Int4Rows& a, int64_t rows, const Int4Block* blocks, int64_t depth,
                            int32_t* sums, int64_t stride);

constexpr int64_t kParts = kTilePair / kLanes;  // vectors of 32 columns
constexpr int64_t kHalf = kTileSide / kLanes;   // of a tile
constexpr int64_t kBytes = sizeof(LaneWords);
constexpr int64_t kFetched = 2 * sizeof(Int4Block);  // bytes that a block is fetched ahead

typedef uint16_t LaneHalves __attribute__((vector_size(4 * kLanes), may_alias));
typedef uint8_t LaneBytes __attribute__((vector_size(4 * kLanes), may_alias));
typedef int8_t SmallBytes __attribute__((vector_size(2 * kLanes), may_alias));
typedef int32_t Four __attribute__((may_alias, aligned(1)));  // codes

LaneBits pairs_of(const Int4Block& block, int64_t part, int64_t unit) {
    LaneBits pairs;
    std::memcpy(&pairs, block.pairs[part / kHalf][unit] + part % kHalf * kBytes, kBytes);
    return pairs;
}

// Multipliers of each column, of both groups, 16 bits each.
struct Multipliers {
    LaneHalves magnitude, negative;  // |m|; of m below 0 again, else 0

    Multipliers(const Int4Block& block, int64_t part) {
        SmallBytes both;
        std::memcpy(&both, block.multipliers[part / kHalf][part % kHalf * kLanes], sizeof both);
        const LaneShorts wide = __builtin_convertvector(both, LaneShorts), signs = wide >> 15;
        magnitude = (LaneHalves)((wide ^ signs) - signs);
        negative = magnitude & (LaneHalves)signs;
    }

    // The stored form of code 0, times |m|.
    LaneHalves zero() const { return 8 * magnitude - negative; }
};

// Unpacks pairs of codes to bytes: |m| times the stored code, before `zero` is subtracted.
struct Unpacking {
    // |m| of one group, twice: products of bytes are below 256, and do not meet.
    LaneHalves lower_factor, upper_factor;
    // The stored form of code 0, times |m|, of both groups.
    LaneHalves zero;

    Unpacking(const Int4Block& block, int64_t part) {
        const Multipliers multipliers(block, part);
        const LaneBits both = (LaneBits)multipliers.magnitude,
                       shifted = (LaneBits)(multipliers.magnitude << kUpperShift);
        lower_factor = (LaneHalves)((both & 0xFFFFu) | both << 16);
        upper_factor = (LaneHalves)((shifted & 0xFFFF0000u) | shifted >> 16);
        zero = multipliers.zero();
    }

    LaneBits lower(LaneBits pairs) const {
        return (LaneBits)((LaneHalves)(pairs & 0x0F0F0F0Fu) * lower_factor);
    }

#if defined(__AVX512F__) || defined(__AVX2__)
    // The upper 16 bits of a product: codes are 16 times as large, and factors 4096 times.
    static constexpr int kUpperShift = 12;
    LaneBits upper(LaneBits pairs) const {
#if defined(__AVX512F__)
        return (LaneBits)_mm512_mulhi_epu16((__m512i)(pairs & 0xF0F0F0F0u), (__m512i)upper_factor);
#else
        return (LaneBits)_mm256_mulhi_epu16((__m256i)(pairs & 0xF0F0F0F0u), (__m256i)upper_factor);
#endif
    }
#else
    static constexpr int kUpperShift = 0;
    LaneBits upper(LaneBits pairs) const {
        return (LaneBits)(((LaneHalves)pairs >> 4 & 0x0F0F) * upper_factor);
    }
#endif
};

void fetch_block(const Int4Block& block) {
    const char* lines = reinterpret_cast<const char*>(&block) + kFetched;
#pragma GCC unroll 17
    for (int64_t line = 0; line < static_cast<int64_t>(sizeof block); line += 64)
        __builtin_prefetch(lines + line, 0, 2);
}

// 16-bit products, on any processor. Half-words hold bytes 0 and 1, or 2 and 3, of a column.
void multiply_plain(const Int4Rows& a, int64_t rows, const Int4Block* blocks, int64_t depth,
                    int32_t* sums, int64_t stride) {
    for (int64_t row = 0; row < rows; ++row, sums += stride) {
        const int8_t* codes = a.data + row * a.stride;
        const Int4Start* starts = a.starts + row * depth;
        LaneWords total[kParts] = {};
        for (int64_t k = 0; k < depth; ++k, codes += a.step) {
            uint32_t even[kTileUnits], odd[kTileUnits];  // elements 0 and 2 of a unit, 1 and 3
            for (int64_t unit = 0; unit < kTileUnits; ++unit) {
                const int8_t* four = codes + 4 * unit;
                even[unit] = static_cast<uint16_t>(four[0]) | static_cast<uint32_t>(four[2]) << 16;
                odd[unit] = static_cast<uint16_t>(four[1]) | static_cast<uint32_t>(four[3]) << 16;
            }
            for (int64_t part = 0; part < kParts; ++part) {
                LaneHalves first = {}, second = {};
                for (int64_t unit = 0; unit < kTileUnits / 2; ++unit) {
                    const LaneHalves pairs = (LaneHalves)pairs_of(blocks[k], part, unit);
                    first += (pairs & 15) * (LaneHalves)(even[unit] + LaneBits{});
                    first += (pairs >> 8 & 15) * (LaneHalves)(odd[unit] + LaneBits{});
                    second +=
                        (pairs >> 4 & 15) * (LaneHalves)(even[unit + kTileUnits / 2] + LaneBits{});
                    second += (pairs >> 12) * (LaneHalves)(odd[unit + kTileUnits / 2] + LaneBits{});
                }
                const Multipliers multipliers(blocks[k], part);
                const LaneBits magnitude = (LaneBits)multipliers.magnitude,
                               zero = (LaneBits)multipliers.zero();
                const auto added = [](LaneHalves both) {
                    return ((LaneWords)both << 16 >> 16) + ((LaneWords)both >> 16);
                };
                total[part] += added(first) * (LaneWords)(magnitude & 0xFFFFu);
                total[part] += added(second) * (LaneWords)(magnitude >> 16);
                total[part] -= starts[k].sums[0] * (LaneWords)(zero & 0xFFFFu);
                total[part] -= starts[k].sums[1] * (LaneWords)(zero >> 16);
            }
        }
        std::memcpy(sums, total, sizeof total);
    }
}

#if defined(__AVX2__)

#if defined(__AVX512F__)
constexpr int kVnniRows = 8;  // whose sums have registers
#else
constexpr int kVnniRows = 4;
#endif
constexpr int kSumRows = 4;  // up to which multiply_sums is faster than multiply_unpacking

LaneWords four_of(const int8_t* codes) {
    return *reinterpret_cast<const Four*>(codes) + LaneWords{};
}

// Adds products of two signed half-words.
void add_halves(LaneWords& sum, LaneBits a, LaneHalves b) {
#if defined(__AVX512F__)
    asm("vpdpwssd %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
#else
    asm("%{vex%} vpdpwssd %2, %1, %0" : "+x"(sum) : "x"(a), "x"(b));
#endif
}

// Multiplies sums of groups by m: cheaper than unpacking for few rows.
template <int ROWS>
void multiply_sums(const Int4Rows& a, const Int4Block* blocks, int64_t depth, int32_t* sums,
                   int64_t stride) {
    const int8_t* codes = a.data;
    const Int4Start* starts = a.starts;
    LaneWords total[kParts][ROWS] = {};
    for (int64_t k = 0; k < depth; ++k, codes += a.step) {
        fetch_block(blocks[k]);
#pragma GCC unroll 4
        for (int64_t part = 0; part < kParts; ++part) {
            LaneWords first[ROWS], second[ROWS];  // the latter is 16 times the sum
#pragma GCC unroll 8
            for (int i = 0; i < ROWS; ++i) {
                first[i] = starts[i * depth + k].first + LaneWords{};
                second[i] = starts[i * depth + k].second + LaneWords{};
            }
#pragma GCC unroll 8
            for (int64_t unit = 0; unit < kTileUnits / 2; ++unit) {
                const LaneBits pairs = pairs_of(blocks[k], part, unit);
                const LaneBits lower = pairs & 0x0F0F0F0Fu, upper = pairs & 0xF0F0F0F0u;
#pragma GCC unroll 8
                for (int i = 0; i < ROWS; ++i) {
                    add_products(first[i], lower, four_of(codes + i * a.stride + 4 * unit));
                    add_products(second[i], upper,
                                 four_of(codes + i * a.stride + kInt4Group + 4 * unit));
                }
            }
            const Multipliers multipliers(blocks[k], part);
#pragma GCC unroll 8
            for (int i = 0; i < ROWS; ++i) {
                const LaneBits both = ((LaneBits)first[i] & 0xFFFFu) | (LaneBits)second[i] << 12;
                add_halves(total[part][i], both, multipliers.magnitude);
                add_halves(total[part][i], starts[i * depth + k].both() + LaneBits{},
                           multipliers.negative);
            }
        }
    }
    for (int i = 0; i < ROWS; ++i) {
        for (int64_t part = 0; part < kParts; ++part) {
            std::memcpy(sums + i * stride + part * kLanes, &total[part][i], kBytes);
        }
    }
}

// Unpacks codes in registers.
template <int ROWS>
void multiply_unpacking(const Int4Rows& a, const Int4Block* blocks, int64_t depth, int32_t* sums,
                        int64_t stride) {
    const int8_t* codes = a.data;
    LaneWords total[kParts][ROWS] = {};
    for (int64_t k = 0; k < depth; ++k, codes += a.step) {
        fetch_block(blocks[k]);
#pragma GCC unroll 2
        for (int64_t part = 0; part < kParts; part += 2) {
            const Unpacking left(blocks[k], part), right(blocks[k], part + 1);
            const auto add = [&](const int8_t* four, LaneBits to_left, LaneBits to_right) {
#pragma GCC unroll 8
                for (int i = 0; i < ROWS; ++i) {
                    const LaneWords factor = four_of(four + i * a.stride);
                    add_products(total[part][i], to_left, factor);
                    add_products(total[part + 1][i], to_right, factor);
                }
            };
#pragma GCC unroll 8
            for (int64_t unit = 0; unit < kTileUnits / 2; ++unit) {
                const LaneBits first = pairs_of(blocks[k], part, unit),
                               second = pairs_of(blocks[k], part + 1, unit);
                add(codes + 4 * unit, left.lower(first), right.lower(second));
                add(codes + 4 * unit + kInt4Group, left.upper(first), right.upper(second));
            }
            const LaneHalves zeros[2] = {-left.zero, -right.zero};
#pragma GCC unroll 8
            for (int i = 0; i < ROWS; ++i) {
                const LaneBits both = a.starts[i * depth + k].both() + LaneBits{};
                add_halves(total[part][i], both, zeros[0]);
                add_halves(total[part + 1][i], both, zeros[1]);
            }
        }
    }
    for (int i = 0; i < ROWS; ++i) {
        for (int64_t part = 0; part < kParts; ++part) {
            std::memcpy(sums + i * stride + part * kLanes, &total[part][i], kBytes);
        }
    }
}

template <int... ROWS>
void multiply_vnni(std::integer_sequence<int, ROWS...>, const Int4Rows& a, int64_t rows,
                   const Int4Block* blocks, int64_t depth, int32_t* sums, int64_t stride) {
    static constexpr decltype(&multiply_sums<1>) kKernels[] = {
        ROWS < kSumRows ? multiply_sums<ROWS + 1> : multiply_unpacking<ROWS + 1>...};
    kKernels[rows - 1](a, blocks, depth, sums, stride);
}

void multiply_vnni(const Int4Rows& a, int64_t rows, const Int4Block* blocks, int64_t depth,
                   int32_t* sums, int64_t stride) {
    multiply_vnni(std::make_integer_sequence<int, kVnniRows>{}, a, rows, blocks, depth, sums,
                  stride);
}

#endif

}  // namespace

void unpack(const Int4Block& block, int8_t* tiles, int64_t distance) {
    fetch_block(block);
    for (int64_t part = 0; part < kParts; ++part) {
        const Unpacking codes(block, part);
        const LaneBits zero = (LaneBits)codes.zero;
        const LaneBytes lower_zero = (LaneBytes)((zero & 0xFFFFu) * 0x01010101u);
        const LaneBytes upper_zero = (LaneBytes)((zero >> 16) * 0x01010101u);
        int8_t* to = tiles + part / kHalf * distance + part % kHalf * kBytes;
        for (int64_t unit = 0; unit < kTileUnits / 2; ++unit) {
            const LaneBits pairs = pairs_of(block, part, unit);
            const LaneBytes lower = (LaneBytes)codes.lower(pairs) - lower_zero;
            const LaneBytes upper = (LaneBytes)codes.upper(pairs) - upper_zero;
            std::memcpy(to + unit * kTileInner, &lower, kBytes);
            std::memcpy(to + (unit + kTileUnits / 2) * kTileInner, &upper, kBytes);
        }
    }
}

namespace {

// Rows up to which multiplying in registers is faster than unpacking tiles.
int64_t int4_rows([[maybe_unused]] Instructions instructions) {
#if defined(__AVX2__)
    if (instructions == Instructions::amx) return kSumRows;  // more are faster in tiles
    if (instructions != Instructions::plain) return kVnniRows;
#endif
    return 1;
}

Int4Kernel int4_kernel_of([[maybe_unused]] Instructions instructions) {
#if defined(__AVX2__)
    if (instructions != Instructions::plain) return multiply_vnni;
#endif
    return multiply_plain;
}

#if defined(LSQ_AMX)

// int8 tiles of unpacked blocks, `depth` of the left and then those of the right.
struct Int4Tiles {
    int8_t* data;
    int64_t depth;  // a ring if fewer than the product's
};

// sums of up to 32 rows; a block is unpacked while the one before it is multiplied.
void multiply_unpacked(const TileRows& a, int64_t rows, const Int4Block* blocks, int64_t depth,
                       const Int4Tiles& to, int32_t* sums, int64_t stride) {
    const bool both = rows > kTileSide;
    const int64_t distance = to.depth * kTileBytes;
    zero_sums();
    int8_t* tiles = to.data;
    unpack(blocks[0], tiles, distance);
    for (int64_t k = 0; k < depth; ++k) {
        const int8_t* left = tiles;
        if (k + 1 < depth) {
            tiles = to.data + (k + 1) % to.depth * kTileBytes;
            unpack(blocks[k + 1], tiles, distance);
        }
        load_tile<4>(a.data + k * a.step, a.stride);
        load_tile<6>(left, kTileInner), load_tile<7>(left + distance, kTileInner);
        multiply_int8<0, 4, 6>(), multiply_int8<1, 4, 7>();
        if (!both) continue;
        load_tile<5>(a.data + a.block + k * a.step, a.stride);
        multiply_int8<2, 5, 6>(), multiply_int8<3, 5, 7>();
    }
    store_sums(sums, stride * sizeof(int32_t), both);
}

#endif

#if defined(LSQ_AMX)
constexpr int64_t kRing = 4;  // tiles along K that are unpacked at a time where they are read once
#endif

// A thread's packed strip of a, initial sums, and two columns of tiles.
struct Strip {
    Kept<int8_t> a, tiles;
    Kept<Int4Start> starts;
};

Strip& kept() {
    static thread_local Strip strip;
    return strip;
}

// Packs inner elements [64 k, 64 k + 64) of 32 columns, 0 beyond the last one.
void pack_block(const Int4Group* groups, int64_t stride, int64_t columns, int64_t count,
                Int4Block& block) {
    std::memset(&block, 0, sizeof block);
    std::memset(block.pairs, 0x88, sizeof block.pairs);  // zeros
    for (int64_t column = 0; column < columns; ++column, groups += stride) {
        const int64_t tile = column / kTileSide, lane = column % kTileSide;
        for (int64_t part = 0; part < count; ++part) {
            const Int4Group& group = groups[part];
            block.multipliers[tile][lane][part] = group.multiplier;
            const int shift = part ? 4 : 0;
            for (int64_t i = 0; i < kInt4Group; ++i) {
                const int pair = group.pairs[i % (kInt4Group / 2)];
                const int code =
                    ((i < kInt4Group / 2 ? pair : pair >> 4) & 15) ^ (group.multiplier < 0 ? 7 : 8);
                uint8_t& to = block.pairs[tile][i / 4][4 * lane + i % 4];
                to = static_cast<uint8_t>((to & ~(15 << shift)) | code << shift);
            }
        }
    }
}

}  // namespace

Int4Multiplier::Int4Multiplier(const TileProduct& product)
    : product_(product), blocks_(reinterpret_cast<const Int4Block*>(product.memory)),
      columns_(sums_behind(blocks_, product.columns, product.inner)), a_{},
      depth_(inner_tiles(product.inner)), rows_(0), height_(0), few_(true),
      session_(product.instructions) {}

void Int4Multiplier::take(int64_t first, int64_t count) {
    const Codes& codes = product_.a;
    rows_ = count;
    few_ = count <= int4_rows(product_.instructions);
    height_ = few_ ? count : rounded_up(count, kTilePair);
    const int8_t flipped = !few_ && biased(product_.instructions) ? -128 : 0;
    if (!flipped && product_.inner % kTileInner == 0 && count == height_) {
        a_ = rows_of(codes, first);
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
        const Int4Rows a{a_.data, a_.stride, a_.step, kept().starts.get()};
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

// Packs a weight, as the format stores it, into Int4Blocks and their sums.
LSQ_EXPORT void lsq_pack_int4(const int8_t* stored, int64_t columns, int64_t inner,
                              Int4Block* blocks) {
    const Int4Group* groups = reinterpret_cast<const Int4Group*>(stored);
    const int64_t stride = (inner + kInt4Group - 1) / kInt4Group, depth = inner_tiles(inner);
#pragma omp parallel for schedule(static)
    for (int64_t first = 0; first < columns; first += kTilePair) {
        int32_t* sums = sums_behind(blocks, columns, inner) + first;
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
