// A product of codes whose scales belong to groups along K: M rows, N columns, K values, N and K
// multiples of 16.
//
// -DGROUP is a multiple of 16. Sums of a group are exact; they become floats in registers where the
// group ends, so that the CPU's fused multiply-adds come in the same order.
// lsq/ops/grouped_product.py is the reference.
#include "product_mma.cuh"
#include "vectors.cuh"

namespace {

// That mma adds up at a time: all 32, or a half and zeros.
constexpr int kValues = GROUP % 32 == 0 ? 32 : 16;

// Of a thread: where scales of its rows, or columns, stand.
template <int COUNT>
struct Scales {
    const float* from[COUNT];
    int64_t step;  // from group to group

    // Row, or column, i of the thread is place(i); those beyond the last one read its scales.
    template <class Place>
    __device__ __forceinline__ Scales(const GroupedCodes& codes, int64_t last, const Place& place)
        : step(codes.scale_columns > 1 ? 1 : 0) {
        const float* scale = codes.scale;
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            const int64_t at = place(i) < last ? place(i) : last - 1;
            from[i] = scale + (codes.scale_rows > 1 ? at * codes.scale_columns : 0);
        }
    }

    __device__ __forceinline__ void load(int64_t group, float (&scale)[COUNT]) const {
#pragma unroll
        for (int i = 0; i < COUNT; ++i) scale[i] = from[i][group * step];
    }
};

}  // namespace

LSQ_KERNEL __launch_bounds__(kProductThreads, kProductBlocks)
    lsq_grouped_product(const GroupedProduct op) {
    extern __shared__ __align__(kPattern) unsigned char stages[];
    const int lane = threadIdx.x % kWarp;
    const int64_t row = block_row() + warp_row() + lane / 4,
                  column = block_column() + warp_column() + lane % 4 * 2;
    const Scales<2 * kRowTiles> of_rows(op.a, op.rows, [=](int i) { return row + 8 * i; });
    const Scales<2 * kColumnTiles> of_columns(op.b, op.columns,
                                              [=](int j) { return column + j / 2 * 8 + j % 2; });
    Sums sums = {};
    float total[kRowTiles][kColumnTiles][4] = {};
    int64_t group = 0;
    int left = GROUP;  // values of the group that are to come
    const auto end_group = [&] {
        if (group * GROUP >= op.inner) return;  // there are zeros up to the end of a step
        float a[2 * kRowTiles], b[2 * kColumnTiles];
        of_rows.load(group, a);
        of_columns.load(group, b);
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
            for (int j = 0; j < kColumnTiles; ++j) {
#pragma unroll
                for (int at = 0; at < 4; ++at) {
                    const float sum = static_cast<float>(sums.of[i][j][at]),
                                scale = a[2 * i + at / 2] * b[2 * j + at % 2];
                    total[i][j][at] = fmaf(sum, scale, total[i][j][at]);
                    sums.of[i][j][at] = 0;
                }
            }
        }
        ++group, left = GROUP;
    };
    const TileCopy<kProductThreads, TILE_M> a(op.a.codes, block_row(), op.rows, op.inner);
    const TileCopy<kProductThreads, TILE_N> b(op.b.codes, block_column(), op.columns, op.inner);
    for_steps(a, b, stages, [&](const unsigned char* stage, int64_t) {
#pragma unroll
        for (int chunk = 0; chunk < kChunks; chunk += 2) {
            RowFragments rows, some;
            ColumnFragments columns;
            load_rows(stage, chunk, rows);
            load_columns(stage, chunk, columns);
#pragma unroll
            for (int part = 0; part < 32 / kValues; ++part) {
#pragma unroll
                for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
                    for (int word = 0; word < 4; ++word) {
                        some[i][word] = kValues == 32 || word / 2 == part ? rows[i][word] : 0;
                    }
                }
                multiply_fragments(some, columns, sums);
                left -= kValues;
                if (left == 0) end_group();
            }
        }
    });
    if (left < GROUP) end_group();
    float* out = op.out;
#pragma unroll
    for (int i = 0; i < 2 * kRowTiles; ++i) {
        if (row + 8 * i >= op.rows) continue;
#pragma unroll
        for (int j = 0; j < kColumnTiles; ++j) {
            const float* pair = total[i / 2][j] + i % 2 * 2;
            if (column + 8 * j < op.columns) {
                store_words(out + ((row + 8 * i) * op.columns + column + 8 * j),
                            make_float2(pair[0], pair[1]));
            }
        }
    }
}
LSQ_EXPORT(lsq_grouped_product)
