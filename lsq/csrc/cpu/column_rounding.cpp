#include "column_rounding.h"

#include "loops.h"
#include "random_rounding.h"
#include "tile_kernels.h"

namespace lsq {

namespace {

constexpr int64_t kGroup = 64;  // columns whose tiles are made together: a cache line of x

inline uint32_t magnitude(int8_t code, float scale) {
    return bits_of(static_cast<float>(code) * scale) & 0x7FFFFFFFu;
}

float factor_of(const ProjectWeightGradient& op, int64_t row) {
    return op.gradient.scale[row] * row_scale(op.x.coded, row);
}

// largest [K]: magnitudes of columns over all rows, on all threads -> whether a row's scale is not
// finite.
bool find_largest(const ProjectWeightGradient& op, uint32_t* largest) {
    const int64_t n = op.columns;
    int missing = 0;
#pragma omp parallel reduction(| : missing)
    {
        Aligned<uint32_t> mine(n, 0);
        uint32_t* of_thread = mine.data();
#pragma omp for schedule(static) nowait
        for (int64_t row = 0; row < op.rows; row += 4) {
            const int8_t* line[4];
            float scale[4];
            for (int64_t i = 0; i < 4; ++i) {
                const int64_t at = std::min(row + i, op.rows - 1);
                line[i] = op.x.coded.codes + at * n;
                scale[i] = factor_of(op, at);
                missing |= !(std::fabs(scale[i]) < infinity());
            }
            const int8_t *one = line[0], *two = line[1], *three = line[2], *last = line[3];
            const float first = scale[0], second = scale[1], third = scale[2], fourth = scale[3];
#pragma omp simd
            for (int64_t i = 0; i < n; ++i) {
                const uint32_t a = magnitude(one[i], first), b = magnitude(two[i], second);
                const uint32_t c = magnitude(three[i], third), d = magnitude(last[i], fourth);
                const uint32_t lower = a > b ? a : b, upper = c > d ? c : d,
                               most = lower > upper ? lower : upper;
                of_thread[i] = most > of_thread[i] ? most : of_thread[i];
            }
        }
#pragma omp critical
        for (int64_t i = 0; i < n; ++i) largest[i] = std::max(largest[i], of_thread[i]);
    }
    return missing;
}

// Four rows of x from a column on, whose codes lie together in tiles.
struct Four {
    const int8_t* codes[4];
    float scale[4];
    uint32_t word[4];
};

// Rounds 16 columns for each tile, `distance` bytes apart: units of four codes.
void round_units(const Four& four, int64_t tiles, const float* reciprocal, float q, int8_t* to,
                 int64_t distance) {
#if defined(LSQ_WIDE)
    SixteenAtRandom rounding[4] = {
        {four.word[0], q}, {four.word[1], q}, {four.word[2], q}, {four.word[3], q}};
    for (int64_t column = 0; column < tiles * kTileSide; column += kTileSide, to += distance) {
        const __m512 factor = _mm512_loadu_ps(reciprocal + column);
        __m512i units = _mm512_setzero_si512();
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) {
            const __m128i codes =
                _mm_loadu_si128(reinterpret_cast<const __m128i*>(four.codes[i] + column));
            const __m512 scaled = _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(codes)),
                                                _mm512_set1_ps(four.scale[i]));
            const __m512i code =
                _mm512_slli_epi32(rounding[i].next(_mm512_mul_ps(scaled, factor)), 8 * i);
            const __m512i upper = _mm512_set1_epi32(static_cast<int32_t>(0xFFFFFFFFu << 8 * i));
            // Code where `upper` has bits.
            units = _mm512_ternarylogic_epi32(upper, code, units, 0xCA);
        }
        _mm512_store_si512(to, units);
    }
#else
    alignas(64) uint32_t units[kGroup] = {};
    for (int row = 0; row < 4; ++row) {
        const int8_t* codes = four.codes[row];
        const float scale = four.scale[row];
        uint32_t word = four.word[row];
#pragma GCC ivdep
        for (int64_t i = 0; i < tiles * kTileSide; ++i) {
            const int8_t code = round_finite_at_random(
                static_cast<float>(codes[i]) * scale * reciprocal[i], word, q);
            units[i] |= static_cast<uint32_t>(static_cast<uint8_t>(code)) << 8 * row;
            word += kWordStep;
        }
    }
    for (int64_t tile = 0; tile < tiles; ++tile) {
        std::memcpy(to + tile * distance, units + tile * kTileSide, kTileInner);
    }
#endif
}

}  // namespace

ColumnRounding::ColumnRounding(const ProjectWeightGradient& op, float* column_scale)
    : op_(op), reciprocal_(rounded_up(op.columns, kGroup), 0.0f) {
    Aligned<uint32_t> largest(op.columns, 0);
    poisoned_ = find_largest(op, largest.data());
    for (int64_t i = 0; i < op.columns; ++i) {
        const GradientScale s =
            gradient_scale(poisoned_ ? not_a_number() : float_of(largest[i]), op.gradient.largest);
        column_scale[i] = s.scale * shared_scale(op.x.coded);
        reciprocal_[i] = s.reciprocal;
    }
}

float ColumnRounding::factor(int64_t row) const { return poisoned_ ? 0.0f : factor_of(op_, row); }

void ColumnRounding::to_rows(int8_t* rounded) const {
    const int64_t n = op_.columns;
    for_rows(op_.rows, n, [&](int64_t row, Scratch& scratch) {
        const float scale = factor(row), *inverse = reciprocal_.data();
        const int8_t* line = op_.x.coded.codes + row * n;
        float* scaled = scratch.a.data();
#pragma omp simd
        for (int64_t i = 0; i < n; ++i)
            scaled[i] = static_cast<float>(line[i]) * scale * inverse[i];
        const uint32_t word = philox_word(op_.key[0], op_.subsequence, row);
        round_at_random(scaled, n, 1.0f, word, op_.gradient.largest, rounded + row * n);
        return 0;
    });
}

void ColumnRounding::to_tiles(const TileProduct& product) const {
    const int64_t depth = inner_tiles(op_.rows), distance = depth * kTileBytes;
    const int64_t columns = rounded_up(op_.columns, kTilePair);
    int32_t* sums = column_sums(product);
    std::fill(sums, sums + columns, 0);
#pragma omp parallel
    {
        Aligned<int32_t> mine(biased(product.instructions) ? columns : 0, 0);
#pragma omp for schedule(static) nowait
        for (int64_t k = 0; k < depth; ++k) {
            uint32_t words[kTileInner];
            philox(op_.key[0], op_.subsequence, k * kTileInner, kTileInner, words);
            for (int64_t column = 0; column < columns; column += kGroup) {
                int8_t* tiles = product.memory + column / kTileSide * distance + k * kTileBytes;
                round_tiles(k * kTileInner, column, words, tiles, distance);
                if (mine.empty()) continue;
                for (int64_t i = column; i < std::min(column + kGroup, columns); i += kTileSide) {
                    add_column_sums(tiles + (i - column) / kTileSide * distance, mine.data() + i);
                }
            }
        }
#pragma omp critical
        for (std::size_t i = 0; i < mine.size(); ++i) sums[i] += mine[i];
    }
}

// Rows [first, first + 64) of at most 64 columns; tiles are `distance` bytes apart.
void ColumnRounding::round_tiles(int64_t first, int64_t column, const uint32_t* words, int8_t* to,
                                 int64_t distance) const {
    const int64_t count = std::min(kGroup, op_.columns - column),
                  tiles = rounded_up(count, kTilePair) / kTileSide;
    alignas(64) int8_t edge[4][kGroup] = {};
    for (int64_t row = 0; row < kTileInner; row += 4, to += kTileInner) {
        Four four;
        for (int64_t i = 0; i < 4; ++i) {
            const int64_t at = first + row + i;
            const bool there = at < op_.rows;  // a row beyond the last one is the last one times 0
            four.codes[i] = op_.x.coded.codes + (there ? at : op_.rows - 1) * op_.columns + column;
            four.scale[i] = there ? factor(at) : 0.0f;
            four.word[i] = words[row + i] + static_cast<uint32_t>(column) * kWordStep;
            if (count == kGroup) continue;
            std::copy(four.codes[i], four.codes[i] + count, edge[i]);
            four.codes[i] = edge[i];
        }
        round_units(four, tiles, reciprocal_.data() + column, op_.gradient.largest, to, distance);
    }
}

}  // namespace lsq
