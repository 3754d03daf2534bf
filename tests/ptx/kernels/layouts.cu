// What the project says of layouts, as numbers: fragments as registers lie, places, descriptors.
#define TILE_M 64
#define TILE_N 64
#define STAGES 3
#include "product_copies.cuh"
#include "warpgroup.cuh"

// One product of fragments: a [32, 4], b [32, 2 or 4], sums [32, 4] in words of each lane.
LSQ_KERNEL product_of_fragments(In<uint32_t> a, In<uint32_t> b, In<uint32_t> kept,
                                Out<int32_t> sums) {
    const int lane = threadIdx.x;
    uint32_t of_a[4], of_b[4] = {};
    for (int i = 0; i < 4; ++i) of_a[i] = a[4 * lane + i];
    for (int i = 0; i < (KIND == 3 ? 4 : 2); ++i) of_b[i] = b[(KIND == 3 ? 4 : 2) * lane + i];
    const uint32_t two[2] = {of_b[0], of_b[1]};
    int32_t sum[4];
    for (int i = 0; i < 4; ++i) sum[i] = sums[4 * lane + i];
    if constexpr (KIND == 0) multiply(sum, of_a, two);
    if constexpr (KIND == 1) multiply_bits(sum, of_a, two);
    if constexpr (KIND == 2) {
        float wide[4];
        for (int i = 0; i < 4; ++i) wide[i] = float_of(static_cast<uint32_t>(sum[i]));
        multiply(wide, of_a, two);
        for (int i = 0; i < 4; ++i) sum[i] = static_cast<int32_t>(bits_of(wide[i]));
    }
    if constexpr (KIND == 3) multiply_sparse(sum, of_a, of_b, kept[lane]);
    for (int i = 0; i < 4; ++i) sums[4 * lane + i] = sum[i];
}
LSQ_EXPORT(product_of_fragments)

// Sums [64, COLUMNS] of a [64, 32] and b [COLUMNS, 32], which lie in the stages as they are given,
// in the registers of each thread.
LSQ_KERNEL product_of_warpgroup(In<uint32_t> a, In<uint32_t> b, Out<int32_t> out) {
    extern __shared__ __align__(kPattern) unsigned char rows[];
    auto* words = reinterpret_cast<uint32_t*>(rows);
    for (int i = threadIdx.x; i < 64 * 32; i += 128) words[i] = a[i];
    for (int i = threadIdx.x; i < COLUMNS * 32; i += 128) words[64 * 32 + i] = b[i];
    fence_shared();
    __syncthreads();
    int32_t sums[COLUMNS / 8][4] = {};
    fence_sums(sums);
    const uint64_t of_a = swizzled_matrix(rows), of_b = swizzled_matrix(rows + 64 * kStep);
    begin_multiplication(sums, moved(of_a, 32), moved(of_b, 32));
    commit_multiplications();
    wait_multiplications<0>(sums);
    for (int j = 0; j < COLUMNS / 8; ++j) {
        for (int i = 0; i < 4; ++i)
            out[static_cast<int>(threadIdx.x) * COLUMNS / 2 + 4 * j + i] = sums[j][i];
    }
}
LSQ_EXPORT(product_of_warpgroup)

// Places of the chunks of 64 rows; the descriptor of the stages without its address, and moved.
LSQ_KERNEL places(Out<int32_t> chunks, Out<uint64_t> descriptors) {
    extern __shared__ __align__(kPattern) unsigned char stages[];
    const int row = threadIdx.x;
    for (int chunk = 0; chunk < kChunks; ++chunk)
        chunks[kChunks * row + chunk] = offset_of(row, chunk) / kChunk;
    const uint64_t matrix = swizzled_matrix(stages);
    descriptors[0] = matrix - (shared_address(stages) >> 4);
    descriptors[1] = moved(matrix, 32) - matrix;
}
LSQ_EXPORT(places)
