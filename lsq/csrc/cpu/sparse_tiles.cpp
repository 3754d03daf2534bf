// Packs 2:4 sparse weights, expands and multiplies their blocks. A unit of four elements gets its
// two values by a shuffle of bytes; a table holds the control for each pattern of four bits.
#include "sparse_tiles.h"

#include <cstring>

#include "rows.h"
#include "tile_kernels.h"
#include "tile_reader.h"

namespace lsq {

namespace {

#if defined(__AVX512F__) || defined(__AVX2__)

constexpr int64_t kAhead = sizeof(SparseBlock);  // bytes by which memory is read ahead

// For each pattern, the value of each of the four bytes, 0x80 for a zero. AVX2 looks at three of
// the four bits, which also tell patterns of two apart.
struct Patterns {
    uint32_t controls[16] = {};

    constexpr explicit Patterns(int bits) {
        for (uint32_t pattern = 0; pattern < 16; ++pattern) {
            uint32_t control = 0, value = 0, set = 0;
            for (int i = 0; i < 4; ++i) set += pattern >> i & 1;
            for (int i = 0; i < 4; ++i) control |= (pattern >> i & 1 ? value++ : 0x80u) << 8 * i;
            if (set == 2) controls[pattern & ((1u << bits) - 1)] = control;
        }
    }
};

// Added to controls: a value's index among the 16 bytes of four columns, for unit `unit` of a pair.
struct Indices {
    uint32_t words[kTileSide] = {};

    constexpr explicit Indices(uint32_t unit) {
        for (uint32_t lane = 0; lane < kTileSide; ++lane)
            words[lane] = 0x01010101u * (4 * (lane % 4) + 2 * unit);
    }
};

void fetch(const SparseHalf& half) {
    const char* there = reinterpret_cast<const char*>(&half) + kAhead;
#pragma GCC unroll 8
    for (size_t line = 0; line < sizeof half; line += 64) __builtin_prefetch(there + line, 0, 3);
}

#endif
#if defined(__AVX512F__)

alignas(64) constexpr Patterns kPatterns{4};
alignas(64) constexpr Indices kIndices[2] = {Indices(0), Indices(1)};

// Units 2 * pair and 2 * pair + 1 of half a tile, whose column's bits are in `kept`.
struct Pair {
    __m512i first, second;

    Pair(const SparseHalf& half, __m512i kept, int pair) {
        const __m512i patterns = _mm512_load_si512(kPatterns.controls),
                      values = _mm512_load_si512(half.values[pair]);
        const __m512i even = _mm512_permutexvar_epi32(_mm512_srli_epi32(kept, 8 * pair), patterns);
        const __m512i odd =
            _mm512_permutexvar_epi32(_mm512_srli_epi32(kept, 8 * pair + 4), patterns);
        first = _mm512_shuffle_epi8(values,
                                    _mm512_add_epi8(even, _mm512_load_si512(kIndices[0].words)));
        second =
            _mm512_shuffle_epi8(values, _mm512_add_epi8(odd, _mm512_load_si512(kIndices[1].words)));
    }
};

void expand_half(const SparseHalf& half, int8_t* to) {
    const __m512i kept = _mm512_load_si512(half.kept);
#pragma GCC unroll 4
    for (int pair = 0; pair < 4; ++pair, to += 2 * kTileInner) {
        const Pair units(half, kept, pair);
        _mm512_store_si512(to, units.first);
        _mm512_store_si512(to + kTileInner, units.second);
    }
}

inline void add(__m512i& sum, const int8_t* four, __m512i codes) {
    int32_t bytes;
    std::memcpy(&bytes, four, 4);
    add_products(sum, _mm512_set1_epi32(bytes), codes);
}

template <int ROWS>
void multiply_rows(const TileRows& a, const SparseBlock* blocks, int64_t depth,
                   const int32_t* columns, int32_t* sums, int64_t stride) {
    __m512i sum[2][ROWS][2];  // [tile][row][first or second of a pair]
    for (int tile = 0; tile < 2; ++tile) {
        const __m512i start =
            _mm512_sub_epi32(__m512i{}, _mm512_loadu_si512(columns + tile * kTileSide));
        for (int row = 0; row < ROWS; ++row)
            sum[tile][row][0] = start, sum[tile][row][1] = __m512i{};
    }
    for (int64_t k = 0; k < depth; ++k) {
#pragma GCC unroll 2
        for (int tile = 0; tile < 2; ++tile) {
#pragma GCC unroll 2
            for (int along = 0; along < 2; ++along) {
                const SparseHalf& half = blocks[k].halves[tile][along];
                const int8_t* codes = a.data + k * a.step + along * kTileInner / 2;
                fetch(half);
                const __m512i kept = _mm512_load_si512(half.kept);
#pragma GCC unroll 4
                for (int pair = 0; pair < 4; ++pair) {
                    const Pair units(half, kept, pair);
#pragma GCC unroll 8
                    for (int row = 0; row < ROWS; ++row) {
                        const int8_t* fours = codes + row * a.stride + 8 * pair;
                        add(sum[tile][row][0], fours, units.first);
                        add(sum[tile][row][1], fours + 4, units.second);
                    }
                }
            }
        }
    }
    for (int tile = 0; tile < 2; ++tile) {
        for (int row = 0; row < ROWS; ++row) {
            const __m512i both = _mm512_add_epi32(sum[tile][row][0], sum[tile][row][1]);
            _mm512_storeu_si512(sums + row * stride + tile * kTileSide, both);
        }
    }
}

void multiply_few(const TileRows& a, int64_t rows, const SparseBlock* blocks, int64_t depth,
                  const int32_t* columns, int32_t* sums, int64_t stride) {
    const auto kernel = rows == 1   ? multiply_rows<1>
                        : rows <= 4 ? multiply_rows<4>
                                    : multiply_rows<8>;
    kernel(a, blocks, depth, columns, sums, stride);
}

#elif defined(__AVX2__)

alignas(32) constexpr Patterns kPatterns{3};
alignas(32) constexpr Indices kIndices[2] = {Indices(0), Indices(1)};

void expand_half(const SparseHalf& half, int8_t* to) {
    const auto load = [](const void* from) {
        return _mm256_load_si256(static_cast<const __m256i*>(from));
    };
    const __m256i patterns = load(kPatterns.controls);
    for (int64_t first = 0; first < kTileSide; first += 8) {
        const __m256i kept = load(half.kept + first);
        for (int unit = 0; unit < 8; ++unit) {
            const __m256i control =
                _mm256_permutevar8x32_epi32(patterns, _mm256_srli_epi32(kept, 4 * unit));
            const __m256i indices = _mm256_add_epi8(control, load(kIndices[unit % 2].words));
            const __m256i codes = _mm256_shuffle_epi8(load(half.values[unit / 2][first]), indices);
            _mm256_store_si256(reinterpret_cast<__m256i*>(to + unit * kTileInner + 4 * first),
                               codes);
        }
    }
}

#else

void fetch(const SparseHalf&) {}

void expand_half(const SparseHalf& half, int8_t* to) {
    for (int64_t unit = 0; unit < kTileUnits / 2; ++unit, to += kTileInner) {
        for (int64_t column = 0; column < kTileSide; ++column) {
            const int8_t* values = half.values[unit / 2][column][unit % 2];
            for (int i = 0; i < 4; ++i) {
                const bool there = half.kept[column] >> (4 * unit + i) & 1;
                to[4 * column + i] = there ? *values : 0;
                values += there;
            }
        }
    }
}

#endif

}  // namespace

void unpack(const SparseBlock& block, int8_t* tiles, int64_t distance) {
    for (int tile = 0; tile < 2; ++tile) {
        for (int along = 0; along < 2; ++along) {
            fetch(block.halves[tile][along]);
            expand_half(block.halves[tile][along],
                        tiles + tile * distance + along * kTileBytes / 2);
        }
    }
}

// The kernel of few rows, in registers, or null.
SparseKernel sparse_kernel() {
#if defined(__AVX512F__)
    if (usable(Instructions::avx512_vnni)) return multiply_few;
#endif
    return nullptr;
}

namespace {

constexpr int64_t kFewRows = 8;  // up to which registers hold all sums of a block

// A thread's packed strip of a, and expanded tiles.
struct Strip {
    Kept<int8_t> a, tiles;
};

Strip& kept() {
    static thread_local Strip strip;
    return strip;
}

// Compresses half a tile of units. -> whether each four has at most two values
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
      columns_(sums_behind(blocks_, product.columns, product.inner)), a_{},
      depth_(inner_tiles(product.inner)), rows_(0), kernel_(nullptr),
      session_(product.instructions) {}

void SparseMultiplier::take(int64_t first, int64_t count) {
    const Codes& codes = product_.a;
    rows_ = count;
    kernel_ = count <= kFewRows && product_.instructions != Instructions::plain ? sparse_kernel()
                                                                                : nullptr;
    const bool is_biased = kernel_ || biased(product_.instructions);
    const bool whole = count == height() && product_.inner % kTileInner == 0;
    a_ = !is_biased && whole
             ? rows_of(codes, first)
             : packed_rows(codes, product_.inner, first, count, is_biased, kept().a);
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

// Packs b. fits[0]: whether each four of its codes has at most two values; else the result is
// invalid.
LSQ_EXPORT void lsq_pack_sparse(const TileProduct& product, int64_t* fits) {
    const int64_t depth = inner_tiles(product.inner);
    auto* blocks = reinterpret_cast<SparseBlock*>(product.memory);
    bool all = true;
#pragma omp parallel for schedule(static) reduction(&& : all)
    for (int64_t group = 0; group < groups_of_columns(product); ++group) {
        const int64_t first = group * kTileGroup,
                      rows = std::min(kTileGroup, product.columns - first);
        const int64_t distance = depth * kTileBytes;
        int32_t* sums = sums_behind(blocks, product.columns, product.inner) + first;
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
