// Transposes codes for the backward products, whose operands are contiguous along the inner
// dimension.
//
// M rows, N columns, a multiple of 16; P is M rounded up to a multiple of 16, with zeros beyond M.
// Rounding codes times row factors with a scale per column takes two launches: largest magnitudes
// of parts of the rows, then scales and codes. lsq/quant/arithmetic.py (round_columns) is the
// reference.
#include "random.cuh"
#include "reduce.cuh"
#include "rounding.cuh"
#include "transpose.cuh"

namespace {

constexpr int kColumnGroups = kTile / kGroupColumns, kRowGroups = kTileThreads / kColumnGroups;
constexpr int kSlices = kTileThreads / kTile;  // threads of a column

// 16 codes of a row times its factor.
LSQ_INLINE void load16(const int8_t* from, float factor, float (&x)[16]) {
    const uint4 words = load_words<uint4>(from);
    const uint32_t four[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
    for (int i = 0; i < 16; ++i)
        x[i] = static_cast<float>(static_cast<int8_t>(four[i / 4] >> (8 * (i % 4)))) * factor;
}

// Transposes a tile of codes [rows, columns] to out [columns, padded]. All threads of the block
// must call this.
LSQ_INLINE void transpose_tile(const TilePosition tile, const int8_t* codes, int8_t* out,
                               int64_t rows, int64_t columns, int64_t padded) {
    const int64_t row = tile.row(), column = tile.column();
    const int8_t* from = codes + (row * columns + column);
    uint4 line[kGroupRows];
#pragma unroll
    for (int r = 0; r < kGroupRows; ++r) {
        line[r] = make_uint4(0, 0, 0, 0);
        if (row + r < rows && column < columns) line[r] = load_words<uint4>(from + r * columns);
    }
    uint32_t word[4][4] = {{line[0].x, line[1].x, line[2].x, line[3].x},
                           {line[0].y, line[1].y, line[2].y, line[3].y},
                           {line[0].z, line[1].z, line[2].z, line[3].z},
                           {line[0].w, line[1].w, line[2].w, line[3].w}};
    uint32_t column_word[kGroupColumns];
#pragma unroll
    for (int i = 0; i < kGroupColumns; ++i) {
        if (i % 4 == 0) transpose_bytes(word[i / 4]);
        column_word[i] = word[i / 4][i % 4];
    }
    store_transposed(tile, column_word, out, columns, padded);
}

// Joins lanes DISTANCE apart with the same columns: either keeps HALF of them. -> the first of
// these
template <int HALF, int DISTANCE>
LSQ_INLINE int join_half(float (&largest)[16]) {
    const bool upper = threadIdx.x & DISTANCE;
#pragma unroll
    for (int i = 0; i < HALF; ++i) {
        const float kept = upper ? largest[i + HALF] : largest[i],
                    given = upper ? largest[i] : largest[i + HALF];
        largest[i] = LargestMagnitude::join(kept, __shfl_xor_sync(kAllLanes, given, DISTANCE));
    }
    return upper ? HALF : 0;
}

LSQ_INLINE float factor_of(const ProjectWeightGradient& op, int64_t row) {
    return op.gradient.scale[row] * row_scale(op.x.coded, row);
}

// x [M, N] -> partial float32 [N]: each column's largest magnitude in rows [begin, end), NaN if one
// is, for one tile of the columns. All threads of the block must call this.
LSQ_INLINE void column_largest(int64_t tile, const ProjectWeightGradient& op, float* partial,
                               int64_t begin, int64_t end) {
    const int8_t* codes = op.x.coded.codes;
    const int64_t columns = op.columns,
                  column = tile * kTile + threadIdx.x % kColumnGroups * kGroupColumns;
    float largest[16] = {};
    if (column < columns) {
#pragma unroll 4
        for (int64_t row = begin + threadIdx.x / kColumnGroups; row < end; row += kRowGroups) {
            float x[16];
            load16(codes + row * columns + column, factor_of(op, row), x);
#pragma unroll
            for (int i = 0; i < 16; ++i) largest[i] = LargestMagnitude::join(largest[i], x[i]);
        }
    }
    constexpr int kWarps = kTileThreads / kWarp;
    __shared__ float4 part[kWarps][kTile / 4];
    // Lanes with the same column group lie 8 apart.
    int first = threadIdx.x % kColumnGroups * kGroupColumns;
    first += join_half<8, 16>(largest);
    first += join_half<4, 8>(largest);
    store_words(part[threadIdx.x / kWarp] + first / 4,
                make_float4(largest[0], largest[1], largest[2], largest[3]));
    __syncthreads();
    const int64_t mine = tile * kTile + threadIdx.x;
    if (threadIdx.x >= kTile || mine >= columns) return;
    const float* of_column = reinterpret_cast<const float*>(part) + threadIdx.x;
    float overall = of_column[0];
#pragma unroll
    for (int warp = 1; warp < kWarps; ++warp)
        overall = LargestMagnitude::join(overall, of_column[warp * kTile]);
    partial[mine] = overall;
}

// partial [parts, N] -> reciprocals of a tile's columns, for codes within q, and their scales,
// unless null. All threads of the block must call this.
LSQ_INLINE void column_scales(int64_t tile, const float* partial, int64_t parts, int64_t columns,
                              float q, float* scale, float (&reciprocal)[kTile]) {
    __shared__ float slices[kSlices][kTile];
    const int slice = threadIdx.x / kTile, here = threadIdx.x % kTile;
    const int64_t column = tile * kTile + here;
    float largest = 0.0f;
    if (column < columns) {
#pragma unroll 8
        for (int64_t part = slice; part < parts; part += kSlices) {
            largest = LargestMagnitude::join(largest, partial[part * columns + column]);
        }
    }
    slices[slice][here] = largest;
    __syncthreads();
    if (slice == 0) {
#pragma unroll
        for (int i = 1; i < kSlices; ++i)
            largest = LargestMagnitude::join(largest, slices[i][here]);
        const GradientScale s = gradient_scale(largest, q);
        reciprocal[here] = s.reciprocal;
        if (scale && column < columns) scale[column] = s.scale;
    }
    __syncthreads();
}

}  // namespace

// codes int8 [M, N] -> out int8 [N, P].
LSQ_KERNEL __launch_bounds__(kTileThreads)
    lsq_transpose_codes(In<int8_t> codes, Out<int8_t> out, int64_t rows, int64_t columns,
                        int64_t padded) {
    wait_for_launches();
    transpose_tile({blockIdx.x, blockIdx.y}, codes, out, rows, columns, padded);
}
LSQ_EXPORT(lsq_transpose_codes)

// Prepares both operands of the product for the gradient of a weight: the gradient's codes [M,
// outputs], transposed to [outputs, P], and partial [parts, N], largest magnitudes of the columns
// of x [M, N] times the scales of rows, in `parts` runs of rows, by the first blocks.
LSQ_KERNEL __launch_bounds__(kTileThreads, 2)
    lsq_begin_weight_gradient(const ProjectWeightGradient op, Out<int8_t> transposed,
                              Out<float> partial, int64_t parts, int64_t outputs, int64_t padded) {
    wait_for_launches();
    const int64_t strips = (op.columns + kTile - 1) / kTile, tiles = (padded + kTile - 1) / kTile;
    const int64_t block = blockIdx.x, after = block - parts * strips;
    if (after >= 0) {
        transpose_tile({after % tiles, after / tiles}, op.gradient.codes, transposed, op.rows,
                       outputs, padded);
        return;
    }
    const int64_t part = block % parts, run = (op.rows + parts - 1) / parts, begin = part * run;
    column_largest(block / parts, op, partial + part * op.columns, begin,
                   min(begin + run, op.rows));
}
LSQ_EXPORT(lsq_begin_weight_gradient)

// x [M, N] times the scales of rows, partial [parts, N] -> scale [N] and out [N, P], rounded at
// random.
LSQ_KERNEL __launch_bounds__(kTileThreads)
    lsq_round_transposed(const ProjectWeightGradient op, In<float> partial, Out<float> scale,
                         Out<int8_t> out, int64_t parts, int64_t padded) {
    wait_for_launches();
    const TilePosition tile{blockIdx.x, blockIdx.y};
    const int64_t row = tile.row(), column = tile.column(), rows = op.rows, columns = op.columns;
    const int8_t* codes = op.x.coded.codes;
    const float q = op.gradient.largest;
    __shared__ float reciprocal[kTile];
    column_scales(blockIdx.y, partial, parts, columns, q,
                  blockIdx.x ? nullptr : static_cast<float*>(scale), reciprocal);
    uint32_t word[kGroupColumns] = {};
    if (column < columns) {
        float inverse[16];
#pragma unroll
        for (int i = 0; i < 16; ++i)
            inverse[i] = reciprocal[threadIdx.x % kColumnGroups * kGroupColumns + i];
        // A word for each row.
        PhiloxWords drawn = philox_group(op.key[0], op.subsequence, row / kGroupRows);
        const uint32_t offset = static_cast<uint32_t>(column) * kWordStep;
        // Each row's codes enter at the top of the columns' words; unrolling costs registers.
#pragma unroll 1
        for (int r = 0; r < kGroupRows; ++r) {
            if (row + r >= rows) {
#pragma unroll
                for (int i = 0; i < 16; ++i) word[i] >>= 8;
                continue;
            }
            float x[16];
            load16(codes + (row + r) * columns + column, factor_of(op, row + r), x);
            const uint32_t first = drawn.word[0] + offset;
            drawn = {{drawn.word[1], drawn.word[2], drawn.word[3], 0}};
#pragma unroll
            for (int i = 0; i < 16; ++i) {
                const uint32_t code = code_at_random(x[i] * inverse[i], first + i * kWordStep, q);
                word[i] = __byte_perm(word[i], code, 0x4321);
            }
        }
#pragma unroll
        for (int i = 0; i < 16; ++i) word[i] = inverse[i] == 0.0f ? 0 : word[i];
    }
    store_transposed(tile, word, out, columns, padded);
}
LSQ_EXPORT(lsq_round_transposed)
