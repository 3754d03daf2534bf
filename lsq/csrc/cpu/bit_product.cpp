// Rounding to planes of bits, and products of planes or of the same codes as bytes.
#include "../include/bit_rounding.h"
#include "aligned.h"
#include "lanes.h"
#include "loops.h"
#include "packed.h"

using namespace lsq;

namespace {

constexpr int64_t kStrip = 128;      // rows whose sums a thread makes at a time, whole words
constexpr int64_t kRounded = 2048;   // values that are rounded at a time, whole words
constexpr int64_t kUnpacked = 16;    // lines that are unpacked at a time
constexpr int64_t kByteStrip = 32;   // rows of bytes, see packed_project.cpp
constexpr int kLines = kLanes == 16 ? 4 : 2;    // whose sums have registers,
constexpr int kVectors = kLanes == 16 ? 4 : 2;  // with so many vectors of columns

uint32_t* plane_of(const BitMatrix& matrix, int64_t plane) {
    return reinterpret_cast<uint32_t*>(static_cast<uint8_t*>(matrix.planes)) +
           plane * matrix.lines * matrix.words;
}

// Counts the bits of the four words of a tile in each lane: here in bytes.
struct ByteCounts {
    LaneBits sum = {};

    void add(LaneBits words) {
#if defined(__AVX512BW__) || defined(__AVX2__)
        sum += in_nibbles(words & 0x0F0F0F0Fu) + in_nibbles(words >> 4 & 0x0F0F0F0Fu);
#else
        words -= words >> 1 & 0x55555555u;
        words = (words & 0x33333333u) + (words >> 2 & 0x33333333u);
        sum += (words + (words >> 4)) & 0x0F0F0F0Fu;
#endif
    }
    LaneWords total() const { return (LaneWords)(sum * 0x01010101u >> 24); }

private:
#if defined(__AVX512BW__)
    static LaneBits in_nibbles(LaneBits nibbles) {
        const __m512i counts = _mm512_broadcast_i32x4(
            _mm_setr_epi8(0, 1, 1, 2, 1, 2, 2, 3, 1, 2, 2, 3, 2, 3, 3, 4));
        return (LaneBits)_mm512_shuffle_epi8(counts, (__m512i)nibbles);
    }
#elif defined(__AVX2__)
    static LaneBits in_nibbles(LaneBits nibbles) {
        const __m256i counts = _mm256_broadcastsi128_si256(
            _mm_setr_epi8(0, 1, 1, 2, 1, 2, 2, 3, 1, 2, 2, 3, 2, 3, 3, 4));
        return (LaneBits)_mm256_shuffle_epi8(counts, (__m256i)nibbles);
    }
#endif
};

#if defined(__AVX512F__)
// By VPOPCNTDQ, which not every processor with AVX-512 has.
struct WordCounts {
    LaneBits sum = {};

    void add(LaneBits words) {
        LaneBits counts;
        asm("vpopcntd %1, %0" : "=v"(counts) : "v"(words));
        sum += counts;
    }
    LaneWords total() const { return (LaneWords)sum; }
};
#endif

// The tiles of eight rows that are multiplied; numbers null: all of them.
struct TileList {
    const int32_t* numbers;
    int64_t count;

    int64_t word(int64_t tile) const { return kBitTileWords * (numbers ? numbers[tile] : tile); }
};

// A plane of a row of the left operand, and where its sums are added.
struct BitLine {
    const uint32_t* words;
    int32_t factor;  // of the plane
    int32_t* sums;
};

// Columns of a plane of the right operand.
struct BitColumns {
    const uint32_t* words;
    int64_t stride;  // words from a word of a column to its next
    int32_t factor;  // of the plane
};

template <class Counts, int LINES, int VECTORS>
void add_lines(const BitLine* lines, const BitColumns& b, const TileList& tiles, int64_t column) {
    LaneWords total[LINES][VECTORS] = {};
    for (int64_t tile = 0; tile < tiles.count; ++tile) {
        const int64_t word = tiles.word(tile);
        const uint32_t* from = b.words + word * b.stride;
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; ++v) {
            LaneBits columns[kBitTileWords];
#pragma GCC unroll 4
            for (int i = 0; i < kBitTileWords; ++i)
                std::memcpy(&columns[i], from + i * b.stride + v * kLanes, sizeof columns[i]);
#pragma GCC unroll 4
            for (int line = 0; line < LINES; ++line) {
                Counts counts;
#pragma GCC unroll 4
                for (int i = 0; i < kBitTileWords; ++i)
                    counts.add(columns[i] & (lines[line].words[word + i] + LaneBits{}));
                total[line][v] += counts.total();
            }
        }
    }
    for (int line = 0; line < LINES; ++line) {
        for (int v = 0; v < VECTORS; ++v) {
            int32_t* to = lines[line].sums + column + v * kLanes;
            LaneWords sum;
            std::memcpy(&sum, to, sizeof sum);
            sum += total[line][v] * (lines[line].factor * b.factor);
            std::memcpy(to, &sum, sizeof sum);
        }
    }
}

template <class Counts, int VECTORS, int LINES = kLines>
void add_all(const BitLine* lines, int64_t count, const BitColumns& b, const TileList& tiles,
             int64_t column) {
    for (; count >= LINES; count -= LINES, lines += LINES)
        add_lines<Counts, LINES, VECTORS>(lines, b, tiles, column);
    if constexpr (LINES > 1) {
        if (count) add_all<Counts, VECTORS, LINES - 1>(lines, count, b, tiles, column);
    }
}

int32_t factor_of(const BitMatrix& matrix, int64_t plane) {
    const int32_t factor = 1 << plane;
    return matrix.is_signed && plane == matrix.bits - 1 ? -factor : factor;
}

// Multiplies planes of rows on one thread; see StripMultiplier.
template <class Counts>
class PlaneMultiplier {
public:
    explicit PlaneMultiplier(const BitProduct& op) : op_(op) {}

    // `first`: a multiple of eight.
    void take(int64_t first, int64_t count) { first_ = first, count_ = count; }
    int64_t height() const { return count_; }

    void multiply(int64_t begin, int64_t end, int32_t* sums, int64_t stride) const {
        for (int64_t row = 0; row < count_; ++row)
            std::fill_n(sums + row * stride, end - begin, 0);
        const int64_t last = std::min(end, op_.b.lines);
        for (int64_t column = begin; column < last;) {
            const int64_t left = last - column;
            if (left >= kVectors * kLanes) {
                multiply_block<kVectors>(column, column - begin, sums, stride);
                column += kVectors * kLanes;
            } else {
                multiply_block<1>(column, column - begin, sums, stride);
                column += kLanes;
            }
        }
    }

private:
    template <int VECTORS>
    void multiply_block(int64_t column, int64_t at, int32_t* sums, int64_t stride) const {
        for (int64_t plane = 0; plane < op_.b.bits; ++plane) {
            const BitColumns b = columns_of(plane, column, VECTORS * kLanes);
            for (int64_t row = 0; row < count_; row += kBitLines)
                multiply_strip<VECTORS>(row, b, at, sums + row * stride, stride);
        }
    }

    template <int VECTORS>
    void multiply_strip(int64_t row, const BitColumns& b, int64_t at, int32_t* sums,
                        int64_t stride) const {
        BitLine lines[kBitLines * 8], *line = lines;
        const int64_t rows = std::min(kBitLines, count_ - row), words = op_.a.words;
        for (int64_t i = 0; i < rows; ++i)
            for (int64_t plane = 0; plane < op_.a.bits; ++plane)
                *line++ = {plane_of(op_.a, plane) + (first_ + row + i) * words,
                           factor_of(op_.a, plane), sums + i * stride};
        TileList tiles{nullptr, words / kBitTileWords};
        if (op_.tiles.begins) {
            const int32_t* begin = op_.tiles.begins + (first_ + row) / kBitLines;
            tiles = {op_.tiles.numbers + begin[0], begin[1] - begin[0]};
        }
        add_all<Counts, VECTORS>(lines, line - lines, b, tiles, at);
    }

    // Columns of a plane, copied where the last ones fill no vector.
    BitColumns columns_of(int64_t plane, int64_t column, int64_t width) const {
        const BitMatrix& b = op_.b;
        const uint32_t* from = plane_of(b, plane) + column;
        const int64_t there = b.lines - column;
        if (there >= width) return {from, b.lines, factor_of(b, plane)};
        static thread_local Kept<uint32_t> kept;
        uint32_t* to = kept.at_least(b.words * width);
        for (int64_t word = 0; word < b.words; ++word) {
            std::memcpy(to + word * width, from + word * b.lines, there * sizeof(uint32_t));
            std::fill_n(to + word * width + there, width - there, 0);
        }
        return {to, width, factor_of(b, plane)};
    }

    const BitProduct& op_;
    int64_t first_ = 0, count_ = 0;
};

// Codes [begin, begin + n) of a row to planes that were zero; `flags`: scratch of n + 8 bytes. A
// thread has the 32 rows of a word; begin: a multiple of 32.
void store_codes(const BitMatrix& to, int64_t row, int64_t begin, int64_t n, const int8_t* codes,
                 uint8_t* flags) {
    for (int64_t plane = 0; plane < to.bits; ++plane) {
        const int shift = static_cast<int>(plane), bit = static_cast<int>(row % kBitWord);
        if (to.by_column) {
            uint32_t* words = plane_of(to, plane) + row / kBitWord * to.lines + begin;
#pragma omp simd
            for (int64_t i = 0; i < n; ++i)
                words[i] |= static_cast<uint32_t>(codes[i] >> shift & 1) << bit;
        } else {
#pragma omp simd
            for (int64_t i = 0; i < n; ++i)
                flags[i] = static_cast<uint8_t>(codes[i] >> shift & 1);
            uint32_t* words = plane_of(to, plane) + row * to.words;
            pack_bits(flags, n, reinterpret_cast<uint8_t*>(words + begin / kBitWord));
        }
    }
}

void clear(const BitMatrix& matrix) {
    std::fill_n(plane_of(matrix, 0), matrix.bits * matrix.lines * matrix.words, 0);
}

BitCoder coder_of(const BitRounding& rounding, const BitMatrix& to) {
    return {rounding.step[0], rounding.start, to.bits};
}

// Takes sums of rows; see multiply_columns.
class SumsEnd {
public:
    SumsEnd(int32_t* sums, int64_t columns) : sums_(sums), columns_(columns) {}

    void operator()(int64_t first, int64_t rows, int64_t begin, int64_t n, const int32_t* sums,
                    int64_t stride) const {
        for (int64_t row = 0; row < rows; ++row)
            std::memcpy(sums_ + (first + row) * columns_ + begin, sums + row * stride,
                        n * sizeof(int32_t));
    }

private:
    int32_t* sums_;
    int64_t columns_;
};

class RoundingEnd {
public:
    explicit RoundingEnd(const BitProduct& op)
        : to_(op.out), coder_(coder_of(op.rule, op.out)), factor_(op.factor[0]) {}

    void operator()(int64_t first, int64_t rows, int64_t begin, int64_t n, const int32_t* sums,
                    int64_t stride) const {
        int8_t codes[kChunk];
        uint8_t flags[kChunk + 8];
        const BitCoder coder = coder_;
        const float factor = factor_;
        for (int64_t row = 0; row < rows; ++row, sums += stride) {
#pragma omp simd
            for (int64_t i = 0; i < n; ++i)
                codes[i] = coder(static_cast<float>(sums[i]) * factor);
            store_codes(to_, first + row, begin, n, codes, flags);
        }
    }

private:
    const BitMatrix& to_;
    BitCoder coder_;
    float factor_;
};

template <class Counts>
void multiply(const BitProduct& op) {
    multiply_columns<int32_t>(op.rows, op.columns, kStrip, [&](const auto& use) {
        PlaneMultiplier<Counts> multiplier(op);
        if (op.out.planes)
            use(multiplier, RoundingEnd(op));
        else
            use(multiplier, SumsEnd(op.sums, op.columns));
    });
}

// codes [n] |= value where a bit of the word is set; n is at most 32.
void spread(uint32_t word, int8_t value, int64_t n, int8_t* codes) {
#if defined(__AVX512BW__) && defined(__AVX512VL__)
    if (n == kBitWord) {
        const __m256i before = _mm256_loadu_si256(reinterpret_cast<__m256i*>(codes));
        const __m256i after = _mm256_or_si256(before, _mm256_maskz_set1_epi8(word, value));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(codes), after);
        return;
    }
#endif
    for (int64_t i = 0; i < n; ++i)
        codes[i] = static_cast<int8_t>(codes[i] | (word >> i & 1 ? value : 0));
}

}  // namespace

LSQ_OPERATION(RoundBits, op) {
    const BitCoder coder = coder_of(op.rule, op.out);
    clear(op.out);
    const int64_t words = (op.rows + kBitWord - 1) / kBitWord;
#pragma omp parallel for schedule(static) if (op.rows * op.columns > kLittle)
    for (int64_t word = 0; word < words; ++word) {
        int8_t codes[kRounded];
        uint8_t flags[kRounded + 8];
        for (int64_t row = word * kBitWord; row < std::min(op.rows, (word + 1) * kBitWord); ++row) {
            for (int64_t begin = 0; begin < op.columns; begin += kRounded) {
                const int64_t n = std::min(kRounded, op.columns - begin);
                const float* x = op.x + row * op.columns + begin;
#pragma omp simd
                for (int64_t i = 0; i < n; ++i) codes[i] = coder(x[i]);
                store_codes(op.out, row, begin, n, codes, flags);
            }
        }
    }
}

LSQ_OPERATION(UnpackBits, op) {
    const BitMatrix& from = op.matrix;
    const int64_t line_step = from.by_column ? 1 : from.words,
                  word_step = from.by_column ? from.lines : 1;
    const int64_t words = std::min(from.words, (op.depth + kBitWord - 1) / kBitWord);
    std::fill_n(static_cast<int8_t*>(op.codes), op.lines * op.depth, 0);
#pragma omp parallel for schedule(static) if (op.lines * op.depth > kLittle)
    for (int64_t first = 0; first < std::min(op.lines, from.lines); first += kUnpacked) {
        const int64_t end = std::min({first + kUnpacked, op.lines, from.lines});
        for (int64_t plane = 0; plane < from.bits; ++plane) {
            const uint32_t* of_plane = plane_of(from, plane);
            const int8_t value = static_cast<int8_t>(factor_of(from, plane));
            for (int64_t word = 0; word < words; ++word) {
                const int64_t n = std::min(kBitWord, op.depth - word * kBitWord);
                for (int64_t line = first; line < end; ++line)
                    spread(of_plane[line * line_step + word * word_step], value, n,
                           op.codes + line * op.depth + word * kBitWord);
            }
        }
    }
}

LSQ_OPERATION(BitProduct, op) {
    if (op.out.planes) clear(op.out);
#if defined(__AVX512F__)
    if (op.popcounts) return multiply<WordCounts>(op);
#endif
    multiply<ByteCounts>(op);
}

LSQ_OPERATION(ByteProduct, op) {
    const PackedWeight& weight = op.weight;
    const TileProduct product = {{op.x, weight.inner, 0},
                                 {nullptr, 0, 0},
                                 op.rows,
                                 weight.columns,
                                 weight.inner,
                                 static_cast<Instructions>(weight.instructions),
                                 0,
                                 reinterpret_cast<int8_t*>(static_cast<uint8_t*>(weight.tiles))};
    multiply_columns<int32_t>(op.rows, weight.columns, weight.step ? kStrip : kByteStrip,
                              [&](const auto& use) {
        with_multiplier(product, weight, [&](auto& multiplier) {
            use(multiplier, SumsEnd(op.sums, weight.columns));
        });
    });
}
