// Transposed codes for the backward products, which need both operands contiguous along the inner dimension.
//
// M rows, N columns, a multiple of 16; P is M rounded up to a multiple of 16, and what lies beyond M is 0. Rounding codes
// times row_factor [M] with a scale for each column takes three steps: largest magnitudes of parts of the rows, scales,
// codes. lsq/quant/arithmetic.py (round_columns) is the reference.
#include "random.cuh"
#include "reduce.cuh"
#include "rounding.cuh"
#include "transpose.cuh"

namespace {

constexpr int kColumnGroups = kTile / kGroupColumns, kRowGroups = kTileThreads / kColumnGroups;

// 16 codes of a row times its factor.
__device__ __forceinline__ void load16(const int8_t* from, float factor, float (&x)[16]) {
    const uint4 words = load_words<uint4>(from);
    const uint32_t four[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
    for (int i = 0; i < 16; ++i) x[i] = static_cast<float>(static_cast<int8_t>(four[i / 4] >> (8 * (i % 4)))) * factor;
}

}  // namespace

// codes int8 [M, N] -> out int8 [N, P].
LSQ_KERNEL __launch_bounds__(kTileThreads) lsq_transpose_codes(
    In<int8_t> codes, Out<int8_t> out, int64_t rows, int64_t columns, int64_t padded) {
    const int64_t row = tile_row(), column = tile_column();
    const int8_t* from = codes + (row * columns + column);
    uint4 line[kGroupRows];
#pragma unroll
    for (int r = 0; r < kGroupRows; ++r) {
        line[r] = make_uint4(0, 0, 0, 0);
        if (row + r < rows && column < columns) line[r] = load_words<uint4>(from + r * columns);
    }
    uint32_t word[4][4] = {
        {line[0].x, line[1].x, line[2].x, line[3].x}, {line[0].y, line[1].y, line[2].y, line[3].y},
        {line[0].z, line[1].z, line[2].z, line[3].z}, {line[0].w, line[1].w, line[2].w, line[3].w}};
    uint32_t column_word[kGroupColumns];
#pragma unroll
    for (int i = 0; i < kGroupColumns; ++i) {
        if (i % 4 == 0) transpose_bytes(word[i / 4]);
        column_word[i] = word[i / 4][i % 4];
    }
    store_transposed(column_word, out, columns, padded);
}
LSQ_EXPORT(lsq_transpose_codes)

// codes [M, N] -> partial float32 [gridDim.x, N]: each column's largest magnitude in a run of rows; NaN is the
// largest.
LSQ_KERNEL __launch_bounds__(kTileThreads, 2) lsq_column_largest(
    In<int8_t> codes, In<float> row_factor, Out<float> partial, int64_t rows, int64_t columns) {
    const int64_t run = (rows + gridDim.x - 1) / gridDim.x, end = min((blockIdx.x + 1) * run, rows);
    const int64_t column = tile_column();
    uint32_t largest[16] = {};
    if (column < columns) {
#pragma unroll 4
        for (int64_t row = blockIdx.x * run + threadIdx.x / kColumnGroups; row < end; row += kRowGroups) {
            float x[16];
            load16(codes + row * columns + column, row_factor[row], x);
#pragma unroll
            for (int i = 0; i < 16; ++i) largest[i] = Largest::join(largest[i], bits_of(x[i]) & 0x7FFFFFFFu);
        }
    }
    constexpr int kWarps = kTileThreads / kWarp;
    __shared__ uint32_t part[kWarps][kTile];
#pragma unroll
    for (int i = 0; i < 16; ++i) {
        // Lanes with the same column group lie 8 apart.
        largest[i] = Largest::join(largest[i], __shfl_xor_sync(kAllLanes, largest[i], 8));
        largest[i] = Largest::join(largest[i], __shfl_xor_sync(kAllLanes, largest[i], 16));
        if (threadIdx.x % kWarp < kColumnGroups) {
            part[threadIdx.x / kWarp][threadIdx.x % kColumnGroups * kGroupColumns + i] = largest[i];
        }
    }
    __syncthreads();
    const int64_t mine = static_cast<int64_t>(blockIdx.y) * kTile + threadIdx.x;
    if (threadIdx.x >= kTile || mine >= columns) return;
    uint32_t overall = part[0][threadIdx.x];
#pragma unroll
    for (int warp = 1; warp < kWarps; ++warp) overall = Largest::join(overall, part[warp][threadIdx.x]);
    partial[blockIdx.x * columns + mine] = float_of(overall);
}
LSQ_EXPORT(lsq_column_largest)

// partial float32 [parts, N] -> scale [N] and its reciprocal [N] for rounding each column to codes within q.
LSQ_KERNEL __launch_bounds__(256) lsq_column_scales(
    In<float> partial, Out<float> scale, Out<float> reciprocal, int64_t parts, int64_t columns, float q) {
    constexpr int kSlices = 256 / kWarp;
    __shared__ uint32_t slices[kSlices][kWarp];
    const int slice = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
    const int64_t column = static_cast<int64_t>(blockIdx.x) * kWarp + lane;
    const float* from = partial;
    uint32_t largest = 0;
    if (column < columns) {
#pragma unroll 8
        for (int64_t part = slice; part < parts; part += kSlices) {
            largest = Largest::join(largest, bits_of(from[part * columns + column]));
        }
    }
    slices[slice][lane] = largest;
    __syncthreads();
    if (slice || column >= columns) return;
#pragma unroll
    for (int i = 1; i < kSlices; ++i) largest = Largest::join(largest, slices[i][lane]);
    const GradientScale s = gradient_scale(float_of(largest), q);
    scale[column] = s.scale;
    reciprocal[column] = s.reciprocal;
}
LSQ_EXPORT(lsq_column_scales)

// codes [M, N], reciprocal [N] -> out int8 [N, P], rounded at random.
LSQ_KERNEL __launch_bounds__(kTileThreads) lsq_round_transposed(
    In<int8_t> codes, In<float> row_factor, In<float> reciprocal, In<int64_t> key, Out<int8_t> out,
    int64_t subsequence, int64_t rows, int64_t columns, int64_t padded, float q) {
    const int64_t row = tile_row(), column = tile_column();
    const int64_t drawn_from = key[0];
    uint32_t word[kGroupColumns] = {};
    if (column < columns) {
        float inverse[16];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float4 four = load_words<float4>(reciprocal + column + 4 * i);
            inverse[4 * i] = four.x, inverse[4 * i + 1] = four.y, inverse[4 * i + 2] = four.z, inverse[4 * i + 3] = four.w;
        }
        // Each row's codes come in at the top of the columns' words; unrolling this would only cost registers.
#pragma unroll 1
        for (int r = 0; r < kGroupRows; ++r) {
            if (row + r >= rows) {
#pragma unroll
                for (int i = 0; i < 16; ++i) word[i] >>= 8;
                continue;
            }
            float x[16];
            PhiloxWords drawn;
            load16(codes + (row + r) * columns + column, row_factor[row + r], x);
            const int64_t group = ((row + r) * columns + column) / 4;
#pragma unroll
            for (int i = 0; i < 16; ++i) {
                if (i % 4 == 0) drawn = philox_group(drawn_from, subsequence, group + i / 4);
                const int8_t code = round_at_random(x[i] * inverse[i], drawn.word[i % 4], q);
                word[i] = word[i] >> 8 | static_cast<uint32_t>(static_cast<uint8_t>(code)) << 24;
            }
        }
    }
    store_transposed(word, out, columns, padded);
}
LSQ_EXPORT(lsq_round_transposed)
