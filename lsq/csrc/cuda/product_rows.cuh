// Hands the sums of a product to its epilogue: through shared memory, 8 rows at a time, so that a
// lane gets eight neighbours of a row, stores fill whole sectors, and the epilogue's code occurs
// once.
//
// Strides and an exchange of quads within pairs (in odd rows, and every other 32 columns) avoid
// bank conflicts of stores and loads.
#pragma once

#include "product.cuh"
#include "reduce.cuh"

namespace lsq {

// Lanes of a row, rows of a warp.
constexpr int kRowGroups = kWarpColumns / kVector, kRowsAtOnce = kWarp / kRowGroups;
#if TRANSPOSED_COLUMNS  // whole quads are stored, of two rows at a time
constexpr int kRowQuads = kWarpColumns / 4 + 4;
#else
constexpr int kRowQuads = kWarpColumns / 4 + 2;
#endif
// Bytes that for_sums uses.
constexpr int kRowsBytes = kTileThreads / kWarp * 8 * kRowQuads * 16;

static_assert(kWarpColumns % 32 == 0 && kWarpColumns <= 256, "as the places of quads are chosen");
static_assert(kRowsBytes <= kEndBytes, "the shared memory to end a tile holds them");

LSQ_INLINE int4* quad_of(int4* rows, int row, int quad) {
    return rows + row * kRowQuads + (quad ^ ((quad / 8 ^ row) & 1));
}

// First of the eight columns of a thread's sums.
LSQ_INLINE int64_t sums_column(Tile tile) {
    return tile.column() + warp_column() + kVector * (threadIdx.x % kRowGroups);
}

// Calls work(row, sum) for every row of the thread's sums; `shared` as of for_tiles. All threads of
// the tile must call this.
template <class Work>
LSQ_INLINE void for_sums(Tile tile, const Sums& sums, unsigned char* shared, const Work& work) {
    const int lane = threadIdx.x % kWarp, first = lane / kRowGroups;
    int4* rows = reinterpret_cast<int4*>(shared) + tile_thread() / kWarp * 8 * kRowQuads;
    const int64_t warp_first = tile.row() + warp_row();
#if TRANSPOSED_ROWS
    const auto row_of_sums = [](int i, int row) { return i / 2 * 16 + row_of(i % 2, row); };
#else
    const auto row_of_sums = [](int i, int row) { return row_of_eight(i) + row; };
#endif
#pragma unroll 1
    for (int i = 0; i < 2 * kRowTiles; ++i) {
#pragma unroll
        for (int at = 0; at < 2 * kRowTiles; ++at) {  // registers have no index
            if (at != i) continue;
#if TRANSPOSED_COLUMNS
#pragma unroll
            for (int j = 0; j < kColumnTiles; j += 2) {
                const int32_t *even = sums.of[at / 2][j] + 2 * (at % 2),
                              *odd = sums.of[at / 2][j + 1] + 2 * (at % 2);
                store_words(quad_of(rows, lane / 4, 2 * j + lane % 4),
                            make_int4(even[0], odd[0], even[1], odd[1]));
            }
#else
#pragma unroll
            for (int j = 0; j < kColumnTiles; ++j) {
                const int32_t* pair = sums.of[at / 2][j] + 2 * (at % 2);
                int4* quad = quad_of(rows, lane / 4, 2 * j + lane % 4 / 2);
                store_words(reinterpret_cast<int2*>(quad) + lane % 2, make_int2(pair[0], pair[1]));
            }
#endif
        }
        __syncwarp();
#pragma unroll 1
        for (int row = first; row < 8; row += kRowsAtOnce) {
            int32_t sum[kVector];
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int4 four =
                    load_words<int4>(quad_of(rows, row, 2 * (lane % kRowGroups) + half));
                sum[4 * half] = four.x, sum[4 * half + 1] = four.y, sum[4 * half + 2] = four.z,
                        sum[4 * half + 3] = four.w;
            }
            work(warp_first + row_of_sums(i, row), sum);
        }
        __syncwarp();
    }
}

// Sums a thread's eight columns over the rows of its warp, in place, for all lanes.
LSQ_INLINE void add_up_rows(float (&sum)[kVector]) {
#pragma unroll
    for (int distance = kRowGroups; distance < kWarp; distance *= 2) {
#pragma unroll
        for (int i = 0; i < kVector; ++i) sum[i] += __shfl_xor_sync(kAllLanes, sum[i], distance);
    }
}

}  // namespace lsq
