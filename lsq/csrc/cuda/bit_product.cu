// Rounding to planes of bits and back, and products of planes; lsq/ops/bit_product.py has the
// formulas.
#include "reduce.cuh"
#include "tensor_core.cuh"

#include "bit_rounding.h"

#ifndef A_BITS
#define A_BITS 1
#define B_BITS 1
#define A_SIGNED 0
#define B_SIGNED 0
#endif

namespace {

constexpr int kWarps = 8;                                // of a block
constexpr int kPatch = 32;                               // rows and columns of sums of a block
constexpr int kStrips = kPatch / static_cast<int>(kBitLines);  // of eight rows, a warp each, ...
constexpr int kColumns = 16;                             // ... with so many columns
constexpr int kSums = 4;                                 // of a lane

// Where a word of a plane lies.
LSQ_INLINE int64_t word_index(const BitMatrix& matrix, int plane, int64_t line, int64_t word) {
    return matrix.by_column ? (plane * matrix.words + word) * matrix.lines + line
                            : (plane * matrix.lines + line) * matrix.words + word;
}

LSQ_INLINE uint32_t word_of(const BitMatrix& matrix, int plane, int64_t line, int64_t word) {
    const uint8_t* planes = matrix.planes;
    return reinterpret_cast<const uint32_t*>(planes)[word_index(matrix, plane, line, word)];
}

// Stores the codes of a word, one a lane. All lanes of a warp must call this.
LSQ_INLINE void store_word(const BitMatrix& to, int64_t line, int64_t word, int8_t code) {
    const int bits = static_cast<int>(to.bits), lane = threadIdx.x % kWarp;
    uint32_t mine = 0;
    for (int plane = 0; plane < bits; ++plane) {
        const uint32_t of_plane = __ballot_sync(kAllLanes, code >> plane & 1);
        mine = lane == plane ? of_plane : mine;
    }
    if (lane < bits && line < to.lines && word < to.words) {
        uint8_t* planes = to.planes;
        reinterpret_cast<uint32_t*>(planes)[word_index(to, lane, line, word)] = mine;
    }
}

LSQ_INLINE BitCoder coder_of(const BitRounding& rule, const BitMatrix& to) {
    const float* start = rule.start;
    return {*rule.step, start, to.bits};
}

// Sums of eight rows and 16 columns: a tile of 8 x 128 bits of `a` is half of the second operand of
// a multiplication, so that any two tiles of a strip can share one.
class StripProduct {
public:
    LSQ_INLINE StripProduct(const BitProduct& op, int64_t row, int64_t column)
        : op_(op), strip_(row / kBitLines), lane_(threadIdx.x % kWarp), row_(row + lane_ / 4),
          column_(column + lane_ / 4) {}

    LSQ_INLINE void add_all() {
        if (row_ >= op_.a.lines) return;
        const int32_t *begins = op_.tiles.begins, *numbers = op_.tiles.numbers;
        const int64_t first = begins ? begins[strip_] : 0,
                      last = begins ? begins[strip_ + 1] : op_.a.words / kBitTileWords;
#pragma unroll 1
        for (int64_t tile = first; tile < last; tile += 2) {
            const int64_t next = tile + 1 < last ? tile + 1 : -1;
            add(begins ? numbers[tile] : tile, begins && next >= 0 ? numbers[next] : next);
        }
    }

    // Sum `i` of this lane, of row 2 * (lane % 4) + i % 2 and column lane / 4 + i / 2 * 8.
    LSQ_INLINE int32_t sum(int i) const {
        int32_t total = 0;
#pragma unroll
        for (int weight = 0; weight < A_BITS + B_BITS - 1; ++weight)
            total += (plus_[weight][i] - minus_[weight][i]) << weight;
        return total;
    }

private:
    // Every tile of `a` is read once, and meets all planes of b.
    LSQ_INLINE void add(int64_t tile, int64_t next) {
        uint32_t of_a[A_BITS][2];
#pragma unroll
        for (int i = 0; i < A_BITS; ++i)
            of_a[i][0] = word(op_.a, i, row_, tile), of_a[i][1] = word(op_.a, i, row_, next);
#pragma unroll
        for (int j = 0; j < B_BITS; ++j) {
            const uint32_t of_b[4] = {
                word(op_.b, j, column_, tile), word(op_.b, j, column_ + 8, tile),
                word(op_.b, j, column_, next), word(op_.b, j, column_ + 8, next)};
#pragma unroll
            for (int i = 0; i < A_BITS; ++i) {
                const bool minus =
                    (A_SIGNED && i == A_BITS - 1) != (B_SIGNED && j == B_BITS - 1);
                multiply_bits(minus ? minus_[i + j] : plus_[i + j], of_b, of_a[i]);
            }
        }
    }

    LSQ_INLINE uint32_t word(const BitMatrix& matrix, int plane, int64_t line,
                             int64_t tile) const {
        if (tile < 0 || line >= matrix.lines) return 0;
        return word_of(matrix, plane, line, tile * kBitTileWords + lane_ % 4);
    }

    const BitProduct& op_;
    int64_t strip_;
    int lane_;
    int64_t row_, column_;
    int32_t plus_[A_BITS + B_BITS - 1][kSums] = {}, minus_[A_BITS + B_BITS - 1][kSums] = {};
};

}  // namespace

LSQ_KERNEL lsq_round_bits(const RoundBits op) {
    wait_for_launches();
    const int lane = threadIdx.x % kWarp;
    const int64_t line = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / kWarp;
    const int64_t along = static_cast<int64_t>(blockIdx.y) * kWarp + lane;
    const int64_t row = op.out.by_column ? along : line, column = op.out.by_column ? line : along;
    const bool there = row < op.rows && column < op.columns;
    const BitCoder coder = coder_of(op.rule, op.out);
    store_word(op.out, line, blockIdx.y, there ? coder(op.x[row * op.columns + column]) : 0);
}
LSQ_EXPORT(lsq_round_bits)

LSQ_KERNEL lsq_unpack_bits(const UnpackBits op) {
    wait_for_launches();
    const int64_t line = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / kWarp;
    const int lane = threadIdx.x % kWarp, bits = static_cast<int>(op.matrix.bits);
    const int64_t word = blockIdx.y, along = word * kWarp + lane;
    if (line >= op.lines || along >= op.depth) return;
    int32_t code = 0;
    if (line < op.matrix.lines && word < op.matrix.words) {
        for (int plane = 0; plane < bits; ++plane) {
            const int32_t bit = word_of(op.matrix, plane, line, word) >> lane & 1;
            code += bit << plane;
        }
        if (op.matrix.is_signed) code -= (code >> (bits - 1)) << bits;
    }
    op.codes[line * op.depth + along] = static_cast<int8_t>(code);
}
LSQ_EXPORT(lsq_unpack_bits)

LSQ_KERNEL __launch_bounds__(kWarps* kWarp) lsq_bit_product(const BitProduct op) {
    wait_for_launches();
    __shared__ int32_t sums[kPatch][kPatch + 1];
    const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
    const int64_t first = static_cast<int64_t>(blockIdx.x) * kPatch,
                  begin = static_cast<int64_t>(blockIdx.y) * kPatch;
    const int strip = warp % kStrips * static_cast<int>(kBitLines),
              columns = warp / kStrips * kColumns;
    StripProduct product(op, first + strip, begin + columns);
    product.add_all();
#pragma unroll
    for (int i = 0; i < kSums; ++i)
        sums[strip + 2 * (lane % 4) + i % 2][columns + lane / 4 + i / 2 * 8] = product.sum(i);
    __syncthreads();
#pragma unroll
    for (int line = warp; line < kPatch; line += kWarps) {
        if (op.out.planes) {
            const BitMatrix& to = op.out;
            const int32_t sum = to.by_column ? sums[lane][line] : sums[line][lane];
            const int8_t code =
                coder_of(op.rule, to)(static_cast<float>(sum) * *op.factor);
            store_word(to, (to.by_column ? begin : first) + line,
                       to.by_column ? blockIdx.x : blockIdx.y, code);
        } else if (first + line < op.rows && begin + lane < op.columns) {
            op.sums[(first + line) * op.columns + begin + lane] = sums[line][lane];
        }
    }
}
LSQ_EXPORT(lsq_bit_product)
