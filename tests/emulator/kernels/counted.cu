// Kernels whose accesses and instructions can be counted by hand.
#include "vectors.cuh"

// One read and one write of a thread, `stride` floats apart.
LSQ_KERNEL strided(In<float> x, Out<float> out, int64_t stride) {
    const int64_t i = (blockIdx.x * blockDim.x + threadIdx.x) * stride;
    out[i] = x[i] + 1.0f;
}
LSQ_EXPORT(strided)

// Vectors of 16 bytes.
LSQ_KERNEL vectors(In<float> x, Out<float> out) {
    float four[kVector];
    load8(x + kVector * threadIdx.x, four);
    store8(out + kVector * threadIdx.x, four);
}
LSQ_EXPORT(vectors)

// Lane i reads i + 1 values of its own line of 64, one at a time, twice with a meeting in between.
LSQ_KERNEL triangle(In<float> x, Out<float> out) {
    float sum = 0.0f;
    for (int i = 0; i <= static_cast<int>(threadIdx.x); ++i) sum += x[64 * threadIdx.x + i];
    __syncwarp();
    for (int i = 0; i <= static_cast<int>(threadIdx.x); ++i) sum += x[64 * threadIdx.x + i];
    out[threadIdx.x] = sum;
}
LSQ_EXPORT(triangle)

// Words of shared memory that are `stride` apart; then all lanes read one, and vectors.
LSQ_KERNEL banks(Out<float> out, int64_t stride) {
    __shared__ float words[32 * 32];
    words[threadIdx.x * stride] = 1.0f;
    __syncthreads();
    out[threadIdx.x] = words[0];
}
LSQ_EXPORT(banks)

LSQ_KERNEL shared_vectors(Out<float> out) {
    __shared__ float4 words[32];
    store_words(words + threadIdx.x, make_float4(1.0f, 2.0f, 3.0f, 4.0f));
    out[threadIdx.x] = 1.0f;
}
LSQ_EXPORT(shared_vectors)

// Roots, quotients and logarithms of each lane, and an atomic of the first.
LSQ_KERNEL special(In<float> x, Out<float> out, Out<uint32_t> count) {
    const float value = x[threadIdx.x];
    out[threadIdx.x] = sqrtf(value) / (value + 1.0f) + logf(value) + 3.0f / value;
    if (threadIdx.x == 0) atomicAdd(count, 1u);
}
LSQ_EXPORT(special)

// The first lane of each warp adds up what it needs `turns` times; the others do nothing.
LSQ_KERNEL lonely(In<float> x, Out<float> out, int64_t turns) {
    if (threadIdx.x % 32) return;
    float sum = x[0];
    for (int64_t i = 0; i < turns; ++i) sum = sum * sum + 1.0f;
    out[0] = sum;
}
LSQ_EXPORT(lonely)
