// What tensor_core.cuh has, one thing at a time; `fault` plants one, 0 none.
#include "tensor_core.cuh"
#include "vectors.cuh"

#ifndef COUNT
#define COUNT 4
#endif
#ifndef TURNED
#define TURNED 0
#endif
#ifndef SIZE
#define SIZE 16
#endif
#ifdef BITS
#define MULTIPLY multiply_bits
#else
#define MULTIPLY multiply
#endif

// out [16, 8] += a times b transposed. Their rows are 32 bytes of int8, or of bits where BITS is
// defined. Every word lies where NVIDIA's documentation says.
LSQ_KERNEL one_multiplication(In<uint32_t> a, In<uint32_t> b, Out<int32_t> out) {
    const int group = threadIdx.x / 4, part = threadIdx.x % 4;
    const uint32_t of_a[4] = {a[8 * group + part], a[8 * (group + 8) + part],
                              a[8 * group + part + 4], a[8 * (group + 8) + part + 4]};
    const uint32_t of_b[2] = {b[8 * group + part], b[8 * group + part + 4]};
    int32_t sums[4];
    for (int i = 0; i < 4; ++i) sums[i] = out[8 * (group + i / 2 * 8) + 2 * part + i % 2];
    MULTIPLY(sums, of_a, of_b);
    for (int i = 0; i < 4; ++i) out[8 * (group + i / 2 * 8) + 2 * part + i % 2] = sums[i];
}
LSQ_EXPORT(one_multiplication)

// out [16, 8] += a [16, 64], of which 32 columns are stored and `kept` [16, 2] has the places,
// times b [8, 64] transposed.
LSQ_KERNEL one_sparse_multiplication(In<uint32_t> a, In<uint32_t> kept, In<uint32_t> b,
                                     Out<int32_t> out) {
    const int group = threadIdx.x / 4, part = threadIdx.x % 4;
    const uint32_t of_a[4] = {a[8 * group + part], a[8 * (group + 8) + part],
                              a[8 * group + part + 4], a[8 * (group + 8) + part + 4]};
    const uint32_t of_b[4] = {b[16 * group + part], b[16 * group + part + 4],
                              b[16 * group + part + 8], b[16 * group + part + 12]};
    int32_t sums[4];
    for (int i = 0; i < 4; ++i) sums[i] = out[8 * (group + i / 2 * 8) + 2 * part + i % 2];
    multiply_sparse(sums, of_a, of_b, kept[2 * (group + part % 2 * 8) + part / 2]);
    for (int i = 0; i < 4; ++i) out[8 * (group + i / 2 * 8) + 2 * part + i % 2] = sums[i];
}
LSQ_EXPORT(one_sparse_multiplication)

// out [16, 8] += a [16, 16] times b [8, 16] transposed, bfloat16 in pairs.
LSQ_KERNEL one_bfloat16_multiplication(In<uint32_t> a, In<uint32_t> b, Out<float> out) {
    const int group = threadIdx.x / 4, part = threadIdx.x % 4;
    const uint32_t of_a[4] = {a[8 * group + part], a[8 * (group + 8) + part],
                              a[8 * group + part + 4], a[8 * (group + 8) + part + 4]};
    const uint32_t of_b[2] = {b[8 * group + part], b[8 * group + part + 4]};
    float sums[4];
    for (int i = 0; i < 4; ++i) sums[i] = out[8 * (group + i / 2 * 8) + 2 * part + i % 2];
    multiply(sums, of_a, of_b);
    for (int i = 0; i < 4; ++i) out[8 * (group + i / 2 * 8) + 2 * part + i % 2] = sums[i];
}
LSQ_EXPORT(one_bfloat16_multiplication)

// out [32] of x [64]: neighbours as a pair.
LSQ_KERNEL pairs(In<float> x, Out<uint32_t> out) {
    out[threadIdx.x] = bfloat16_pair(x[2 * threadIdx.x], x[2 * threadIdx.x + 1]);
}
LSQ_EXPORT(pairs)

// out [32, COUNT]: what each lane gets of x, rows of 16 bytes that lie `stride` bytes apart,
// `shift` bytes too far.
LSQ_KERNEL matrices(In<uint32_t> x, Out<uint32_t> out, int64_t stride, int64_t shift,
                    int64_t fault) {
    alignas(16) __shared__ unsigned char rows[32 * 144 + 16];
    uint32_t* row = reinterpret_cast<uint32_t*>(rows + stride * threadIdx.x);
    for (int i = 0; i < 4; ++i) row[i] = x[4 * threadIdx.x + i];
    __syncwarp();
    uint32_t words[COUNT];
    const void* from =
        fault ? static_cast<const void*>(x + 4 * threadIdx.x) : rows + stride * threadIdx.x;
    load_matrices<COUNT, TURNED != 0>(static_cast<const unsigned char*>(from) + shift, words);
    for (int i = 0; i < COUNT; ++i) out[COUNT * threadIdx.x + i] = words[i];
}
LSQ_EXPORT(matrices)

// Lanes that do not arrive, or elsewhere.
LSQ_KERNEL halves(Out<int32_t> out, int64_t fault) {
    int32_t sums[4] = {};
    const uint32_t a[4] = {}, b[2] = {};
    uint32_t words[1];
    alignas(16) __shared__ unsigned char rows[32 * 16];
    if (threadIdx.x % 32 < 16) multiply(sums, a, b);
    else if (fault) load_matrices(rows + 16 * (threadIdx.x % 32), words);
    out[threadIdx.x] = sums[0];
}
LSQ_EXPORT(halves)

// out [3, 128] = x [3, 128], words of which thread 127 - i reads what thread i copied: a group
// each, all under way at once.
LSQ_KERNEL copies(In<uint32_t> x, Out<uint32_t> out, int64_t inside, int64_t fault) {
    constexpr int words = SIZE / 4, threads = 128 / words;
    alignas(16) __shared__ uint32_t stages[3][128];
    const int mine = words * threadIdx.x;
    for (int i = 0; i < 3; ++i) {
        copy_async<SIZE>(stages[i] + mine, x + 128 * i + mine, mine + words <= inside);
        commit_copies();
    }
    for (int i = 0; i < 3; ++i) {
        if (i == 0) wait_copies<2>();
        if (i == 1 && fault != 1) wait_copies<1>();  // 1: the second group may still be under way
        if (i == 2) wait_copies<0>();
        if (fault != 2) __syncthreads();  // 2: others may not have waited yet
        const int other = words * (threads - 1 - threadIdx.x);
        for (int word = 0; word < words; ++word)
            out[128 * i + other + word] = stages[i][other + word];
        // Still under way.
        if (fault == 3 && i == 0) stages[2][mine] = 0;
        if (fault == 4 && i == 0) copy_async<SIZE>(stages[1] + mine, x + mine);        // likewise
        // Which others still read.
        if (fault == 5 && i == 0) copy_async<SIZE>(stages[0] + mine, x + mine);
        // Which is not aligned.
        if (fault == 6 && i == 0) copy_async<SIZE>(stages[0] + mine, x + mine + 1);
        // No shared memory.
        if (fault == 7 && i == 0) copy_async<SIZE>(out + mine, x + mine);
    }
}
LSQ_EXPORT(copies)

// Values that nobody has waited for are those that were there before; the block after begins anew.
LSQ_KERNEL late(In<uint32_t> x, Out<uint32_t> out) {
    alignas(16) __shared__ uint32_t words[32];
    words[threadIdx.x] = 7;
    __syncthreads();
    out[32 * blockIdx.x + threadIdx.x] = words[threadIdx.x];
    __syncthreads();
    copy_async<4>(words + threadIdx.x, x + threadIdx.x);
}
LSQ_EXPORT(late)
