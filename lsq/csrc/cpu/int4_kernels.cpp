// Multiplies and unpacks blocks of 4-bit codes.
//
// VNNI multiplies unsigned with signed codes, as 4-bit codes are with 8 added: sums begin at -8 times that of a's codes.
// The upper half of a byte needs no shift, since 16 times a code fits a byte as well.
#include "int4_tiles.h"
#include "lanes.h"

#include <type_traits>

namespace lsq {

namespace {

constexpr int64_t kParts = kTilePair / kLanes;       // vectors of 32 columns
constexpr int64_t kHalf = kTileSide / kLanes;        // of a tile
constexpr int64_t kBytes = sizeof(LaneWords);
constexpr int64_t kFetched = 2 * sizeof(Int4Block);  // bytes that a block is fetched ahead

typedef uint16_t LaneHalves __attribute__((vector_size(4 * kLanes), may_alias));
typedef int16_t LaneShorts __attribute__((vector_size(4 * kLanes), may_alias));
typedef uint8_t LaneBytes __attribute__((vector_size(4 * kLanes), may_alias));
typedef int32_t LooseWords __attribute__((vector_size(4 * kLanes), may_alias, aligned(4)));
typedef int32_t Four __attribute__((may_alias, aligned(1)));  // codes

LaneBits pairs_of(const Int4Block& block, int64_t part, int64_t unit) {
    LaneBits found;
    std::memcpy(&found, block.pairs[part / kHalf][unit] + part % kHalf * kBytes, kBytes);
    return found;
}

// Of each column, for both groups, 16 bits each.
struct Multipliers {
    LaneHalves magnitude, negative;  // |m|; of m below 0 again, else 0

    Multipliers() = default;
    Multipliers(const Int4Block& block, int64_t part) {
        const int8_t* from = block.multipliers[part / kHalf][part % kHalf * kLanes];
        LaneHalves wide = {};
        for (int64_t i = 0; i < 2 * kLanes; ++i) wide[i] = from[i];
        const LaneHalves signs = (LaneHalves)((LaneShorts)wide >> 15);
        magnitude = (wide ^ signs) - signs;
        negative = magnitude & signs;
    }

    // What a code of 0 is stored as, times |m|.
    LaneHalves zero() const { return 8 * magnitude - negative; }
};

// By 16-bit products, on any processor. Half-words hold bytes 0 and 1, or 2 and 3, of a column.
void multiply_plain(const Int4Rows& a, int64_t rows, const Int4Block* blocks, int64_t depth, int32_t* sums,
                    int64_t stride) {
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
                    second += (pairs >> 4 & 15) * (LaneHalves)(even[unit + kTileUnits / 2] + LaneBits{});
                    second += (pairs >> 12) * (LaneHalves)(odd[unit + kTileUnits / 2] + LaneBits{});
                }
                const Multipliers multipliers(blocks[k], part);
                const LaneBits magnitude = (LaneBits)multipliers.magnitude, zero = (LaneBits)multipliers.zero();
                const auto added = [](LaneHalves both) { return ((LaneWords)both << 16 >> 16) + ((LaneWords)both >> 16); };
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
constexpr int64_t kVnniRows = 8;  // whose sums have registers
#else
constexpr int64_t kVnniRows = 4;
#endif

// Adds products of four unsigned bytes of each column with four codes. By hand: from intrinsics the compiler (GCC 12)
// copies every sum before and after it.
void add_bytes(LaneWords& sum, LaneBits bytes, LaneWords codes) {
#if defined(__AVX512F__)
    asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(bytes), "v"(codes));
#else
    asm("%{vex%} vpdpbusd %2, %1, %0" : "+x"(sum) : "x"(bytes), "x"(codes));
#endif
}

LaneWords four_of(const int8_t* codes) { return *reinterpret_cast<const Four*>(codes) + LaneWords{}; }

// Adds products of two signed half-words.
void add_halves(LaneWords& sum, LaneBits a, LaneHalves b) {
#if defined(__AVX512F__)
    asm("vpdpwssd %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
#else
    asm("%{vex%} vpdpwssd %2, %1, %0" : "+x"(sum) : "x"(a), "x"(b));
#endif
}

void fetch_block(const Int4Block& block) {
    const char* lines = reinterpret_cast<const char*>(&block) + kFetched;
#pragma GCC unroll 17
    for (int64_t line = 0; line < static_cast<int64_t>(sizeof block); line += 64) __builtin_prefetch(lines + line, 0, 2);
}

// What a block's codes count, as tiles of bytes: m * q if SIGNED, else what a code of 0 counts is still in it. Those of
// the right lie `distance` bytes behind those of the left.
template <bool SIGNED>
void unpack_block(const Int4Block& block, int8_t* tiles, int64_t distance) {
    fetch_block(block);
    for (int64_t part = 0; part < kParts; ++part) {
        const Multipliers multipliers(block, part);
        const LaneBits magnitude = (LaneBits)multipliers.magnitude, zero = (LaneBits)multipliers.zero();
        // Those of one group, twice: products of bytes are below 256, and so do not meet.
        const LaneHalves first = (LaneHalves)((magnitude & 0xFFFFu) | magnitude << 16);
        const LaneHalves second = (LaneHalves)((magnitude & 0xFFFF0000u) | magnitude >> 16);
        const LaneBytes first_zero = (LaneBytes)((zero & 0xFFFFu) * (SIGNED ? 0x01010101u : 0));
        const LaneBytes second_zero = (LaneBytes)((zero >> 16) * (SIGNED ? 0x01010101u : 0));
        int8_t* to = tiles + part / kHalf * distance + part % kHalf * kBytes;
        for (int64_t unit = 0; unit < kTileUnits / 2; ++unit) {
            const LaneHalves pairs = (LaneHalves)pairs_of(block, part, unit);
            const LaneBytes lower = (LaneBytes)((pairs & 0x0F0F) * first) - first_zero;
            const LaneBytes upper = (LaneBytes)((pairs >> 4 & 0x0F0F) * second) - second_zero;
            std::memcpy(to + unit * kTileInner, &lower, kBytes);
            std::memcpy(to + (unit + kTileUnits / 2) * kTileInner, &upper, kBytes);
        }
    }
}

template <int ROWS>
void multiply_rows(const Int4Rows& a, int64_t row, const Int4Block* blocks, int64_t depth, int32_t* sums,
                            int64_t stride) {
    const int8_t* codes = a.data + row * a.stride;
    const Int4Start* starts = a.starts + row * depth;
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
                    add_bytes(first[i], lower, four_of(codes + i * a.stride + 4 * unit));
                    add_bytes(second[i], upper, four_of(codes + i * a.stride + kInt4Group + 4 * unit));
                }
            }
            const Multipliers multipliers(blocks[k], part);
#pragma GCC unroll 8
            for (int i = 0; i < ROWS; ++i) {
                const LaneBits both = ((LaneBits)first[i] & 0xFFFFu) | (LaneBits)second[i] << 12;
                add_halves(total[part][i], both, multipliers.magnitude);
                add_halves(total[part][i], starts[i * depth + k].both() + LaneBits{}, multipliers.negative);
            }
        }
    }
    for (int i = 0; i < ROWS; ++i) {
        for (int64_t part = 0; part < kParts; ++part) {
            std::memcpy(sums + (row + i) * stride + part * kLanes, &total[part][i], kBytes);
        }
    }
}

// Calls use(count, row) for all rows, up to kVnniRows at a time.
template <class Use>
void each_rows(int64_t rows, const Use& use) {
    int64_t row = 0;
    for (; rows - row >= kVnniRows; row += kVnniRows) use(std::integral_constant<int, kVnniRows>{}, row);
    if (rows - row >= 4) use(std::integral_constant<int, 4>{}, row), row += 4;
    if (rows - row >= 2) use(std::integral_constant<int, 2>{}, row), row += 2;
    if (rows - row >= 1) use(std::integral_constant<int, 1>{}, row);
}

// Adds the products of an unpacked block to sums, or, of the first block, begins with them.
template <int ROWS>
void add_unpacked(const Int4Rows& a, int64_t row, int64_t depth, int64_t k, const int8_t* tiles,
                  const Multipliers (&multipliers)[kParts], int32_t* sums, int64_t stride) {
    const int8_t* codes = a.data + row * a.stride + k * a.step;
    for (int64_t part = 0; part < kParts; part += 2) {
        LaneWords sum[ROWS][2];
        int32_t* out = sums + row * stride + part * kLanes;
        if (k) {
#pragma GCC unroll 8
            for (int i = 0; i < ROWS; ++i) {
                sum[i][0] = *reinterpret_cast<const LooseWords*>(out + i * stride);
                sum[i][1] = *reinterpret_cast<const LooseWords*>(out + i * stride + kLanes);
            }
        } else {
#pragma GCC unroll 8
            for (int i = 0; i < ROWS; ++i) sum[i][0] = sum[i][1] = LaneWords{};
        }
        const int8_t* left = tiles + part / kHalf * kTileBytes + part % kHalf * kBytes;
        const int8_t* right = tiles + (part + 1) / kHalf * kTileBytes + (part + 1) % kHalf * kBytes;
#pragma GCC unroll 16
        for (int64_t unit = 0; unit < kTileUnits; ++unit, left += kTileInner, right += kTileInner) {
            LaneBits first, second;
            std::memcpy(&first, left, kBytes), std::memcpy(&second, right, kBytes);
#pragma GCC unroll 8
            for (int i = 0; i < ROWS; ++i) {
                const LaneWords four = four_of(codes + i * a.stride + 4 * unit);
                add_bytes(sum[i][0], first, four);
                add_bytes(sum[i][1], second, four);
            }
        }
        const LaneHalves first_zero = -multipliers[part].zero(), second_zero = -multipliers[part + 1].zero();
#pragma GCC unroll 8
        for (int i = 0; i < ROWS; ++i) {
            const LaneBits both = a.starts[(row + i) * depth + k].both() + LaneBits{};
            add_halves(sum[i][0], both, first_zero);
            add_halves(sum[i][1], both, second_zero);
            *reinterpret_cast<LooseWords*>(out + i * stride) = sum[i][0];
            *reinterpret_cast<LooseWords*>(out + i * stride + kLanes) = sum[i][1];
        }
    }
}

void multiply_vnni(const Int4Rows& a, int64_t rows, const Int4Block* blocks, int64_t depth, int32_t* sums,
                   int64_t stride) {
    if (rows <= kVnniRows) {
        each_rows(rows, [&](auto count, int64_t row) {
            multiply_rows<count.value>(a, row, blocks, depth, sums, stride);
        });
        return;
    }
    alignas(64) int8_t tiles[2 * kTileBytes];
    for (int64_t k = 0; k < depth; ++k) {
        unpack_block<false>(blocks[k], tiles, kTileBytes);
        Multipliers multipliers[kParts];
        for (int64_t part = 0; part < kParts; ++part) multipliers[part] = Multipliers(blocks[k], part);
        each_rows(rows, [&](auto count, int64_t row) {
            add_unpacked<count.value>(a, row, depth, k, tiles, multipliers, sums, stride);
        });
    }
}

#endif

}  // namespace

Int4Kernel int4_kernel_of([[maybe_unused]] Instructions instructions) {
#if defined(__AVX512F__)
    if (instructions == Instructions::avx512_vnni || instructions == Instructions::amx) return multiply_vnni;
#elif defined(__AVX2__)
    if (instructions == Instructions::avx_vnni) return multiply_vnni;
#endif
    return multiply_plain;
}

#if defined(LSQ_AMX)

void multiply_unpacked(const TileRows& a, int64_t rows, const Int4Block* blocks, int64_t depth, const Int4Tiles& to,
                       int32_t* sums, int64_t stride) {
    const bool both = rows > kTileSide;
    const int64_t bytes = stride * sizeof(int32_t), distance = to.depth * kTileBytes;
    int32_t* bottom = sums + kTileSide * stride;
    zero_tile<0>(), zero_tile<1>(), zero_tile<2>(), zero_tile<3>();
    int8_t* tiles = to.data;
    unpack_block<true>(blocks[0], tiles, distance);
    for (int64_t k = 0; k < depth; ++k) {
        const int8_t* left = tiles;
        if (k + 1 < depth) {
            tiles = to.data + (k + 1) % to.depth * kTileBytes;
            unpack_block<true>(blocks[k + 1], tiles, distance);
        }
        load_tile<4>(a.data + k * a.step, a.stride);
        load_tile<6>(left, kTileInner), load_tile<7>(left + distance, kTileInner);
        multiply_int8<0, 4, 6>(), multiply_int8<1, 4, 7>();
        if (!both) continue;
        load_tile<5>(a.data + a.block + k * a.step, a.stride);
        multiply_int8<2, 5, 6>(), multiply_int8<3, 5, 7>();
    }
    store_tile<0>(sums, bytes), store_tile<1>(sums + kTileSide, bytes);
    if (both) store_tile<2>(bottom, bytes), store_tile<3>(bottom + kTileSide, bytes);
}

#endif

}  // namespace lsq
