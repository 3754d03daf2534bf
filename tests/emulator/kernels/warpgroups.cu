// What warpgroup.cuh has, on [64, COLUMNS] sums of 64 values; `fault` plants one, 0 none.
#define TILE_M 64
#define TILE_N COLUMNS
#define WGMMA 1
#include "barriers.cuh"
#include "product_copies.cuh"
#include "vectors.cuh"
#include "warpgroup.cuh"

#ifndef TILES
#define TILES (COLUMNS / 8)
#endif

// out [64, COLUMNS] += a [64, 64] times b [COLUMNS, 64] transposed.
LSQ_KERNEL one_product(In<int8_t> a, In<int8_t> b, Out<int32_t> out, int64_t fault) {
    extern __shared__ __align__(kPattern) unsigned char rows[];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, first = 16 * warp + lane / 4;
    const auto element = [&](int j, int i) -> int32_t& {
        return out[(first + i / 2 * 8) * COLUMNS + 8 * j + lane % 4 * 2 + i % 2];
    };
    int32_t sums[TILES][4];
    for (int j = 0; j < TILES; ++j) {
        for (int i = 0; i < 4; ++i) sums[j][i] = element(j, i);
    }
    const TileCopy<128, 64> copy_a{a, 0, 64, 64};
    const TileCopy<128, COLUMNS> copy_b{b, 0, COLUMNS, 64};
    copy_a.begin(rows, 0);
    copy_b.begin(rows + 64 * kStep, 0);
    commit_copies();
    if (fault == 1) fence_shared();  // too early: nothing has arrived
    wait_copies<0>();
    if (fault != 1 && fault != 2) fence_shared();
    if (fault != 3) __syncthreads();
    uint64_t of_a = swizzled_matrix(rows), of_b = swizzled_matrix(rows + 64 * kStep);
    if (fault == 4) of_a = of_a << 2 >> 2;                      // no swizzle
    if (fault == 5) of_a += 7;                                  // values 112 to 144
    if (fault == 6) of_b = moved(of_b, COLUMNS * kStep + 1024);  // beyond all rows
    if (fault == 7) of_b += 1ull << 32;                         // eight rows do not fill a pattern
    if (fault != 8) fence_sums(sums);
    if (fault != 9 || warp != 2) {
        begin_multiplication(sums, of_a, of_b);
        begin_multiplication(sums, moved(of_a, 32), moved(of_b, 32));
    }
    commit_multiplications();
    if (fault == 10 && threadIdx.x == 0) rows[0] = 0;
    if (fault == 11) copy_b.begin(rows + 64 * kStep, 0);
    if (fault != 12) wait_multiplications<0>(sums);
    if (fault == 13) rows[64 * kStep + threadIdx.x] = 0;  // which other warps may read yet
    if (fault == 14) begin_multiplication(sums, of_a, of_b);
    for (int j = 0; j < TILES; ++j) {
        for (int i = 0; i < 4; ++i) element(j, i) = sums[j][i];
    }
}
LSQ_EXPORT(one_product)

// The second group goes on while the first is there.
LSQ_KERNEL two_groups(In<int8_t> a, In<int8_t> b, Out<int32_t> out) {
    extern __shared__ __align__(kPattern) unsigned char rows[];
    int32_t one[TILES][4] = {}, two[TILES][4] = {};
    TileCopy<128, 64>{a, 0, 64, 64}.begin(rows, 0);
    TileCopy<128, COLUMNS>{b, 0, COLUMNS, 64}.begin(rows + 64 * kStep, 0);
    commit_copies();
    wait_copies<0>();
    fence_shared();
    __syncthreads();
    const uint64_t of_a = swizzled_matrix(rows), of_b = swizzled_matrix(rows + 64 * kStep);
    fence_sums(one);
    begin_multiplication(one, of_a, of_b);
    commit_multiplications();
    begin_multiplication(two, moved(of_a, 32), moved(of_b, 32));
    commit_multiplications();
    wait_multiplications<1>(one);
    out[threadIdx.x] = one[0][0];
    out[128 + threadIdx.x] = two[0][0];  // too early
    wait_multiplications<0>(two);
    out[256 + threadIdx.x] = two[0][0];
}
LSQ_EXPORT(two_groups)

// Lanes that do not arrive.
LSQ_KERNEL halves(Out<int32_t> out) {
    int32_t sums[TILES][4] = {};
    if (threadIdx.x % 32 < 16) fence_sums(sums);
    out[threadIdx.x] = sums[0][0];
}
LSQ_EXPORT(halves)

// out [64, COLUMNS] = a [64, 64] times b [COLUMNS, 64] transposed: a warpgroup copies, and hands
// over to another one, which multiplies. Twice, in the same memory.
LSQ_KERNEL handed_over(In<int8_t> a, In<int8_t> b, Out<int32_t> out, int64_t fault) {
    extern __shared__ __align__(kPattern) unsigned char rows[];
    constexpr int kFull = 1, kEmpty = 2, kAll = 2 * kWarpgroup;
    if (threadIdx.x < kWarpgroup) {
        for (int turn = 0; turn < 2; ++turn) {
            if (turn && fault != 1) sync_barrier<kAll>(kEmpty);
            if (turn && fault == 1) arrive_barrier<kAll>(kEmpty);
            TileCopy<128, 64>{a, 0, 64, 64}.begin(rows, 0);
            TileCopy<128, COLUMNS>{b, 0, COLUMNS, 64}.begin(rows + 64 * kStep, 0);
            commit_copies();
            wait_copies<0>();
            if (fault != 2) fence_shared();
            arrive_barrier<kAll>(kFull);
            if (fault == 2) fence_shared();  // too late
        }
        return;
    }
    int32_t sums[TILES][4] = {};
    const uint64_t of_a = swizzled_matrix(rows), of_b = swizzled_matrix(rows + 64 * kStep);
    for (int turn = 0; turn < 2; ++turn) {
        sync_barrier<kAll>(kFull);
        fence_sums(sums);
        begin_multiplication(sums, moved(of_a, 32 * turn), moved(of_b, 32 * turn));
        commit_multiplications();
        if (fault == 3 && turn == 0) arrive_barrier<kAll>(kEmpty);  // too early
        wait_multiplications<0>(sums);
        if (fault != 3 && turn == 0) arrive_barrier<kAll>(kEmpty);
    }
    const int lane = threadIdx.x % 32, first = 16 * (threadIdx.x / 32 % 4) + lane / 4;
    for (int j = 0; j < TILES; ++j) {
        for (int i = 0; i < 4; ++i)
            out[(first + i / 2 * 8) * COLUMNS + 8 * j + lane % 4 * 2 + i % 2] = sums[j][i];
    }
}
LSQ_EXPORT(handed_over)
