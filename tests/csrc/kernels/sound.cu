// Kernels without faults: block sums through shared memory, warp shuffles, dynamic shared memory, tickets.
#include "emulation.h"

template <typename T>
__device__ T warp_sum(T value) {
    for (int bits = 16; bits > 0; bits /= 2) value += __shfl_xor_sync(0xffffffff, value, bits);
    return value;
}

template <typename T>
__device__ T block_sum(T value) {
    __shared__ T part[32];
    value = warp_sum(value);
    if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = value;
    __syncthreads();
    if (threadIdx.x < 32) {
        value = warp_sum(threadIdx.x < blockDim.x / 32 ? part[threadIdx.x] : T(0));
        if (threadIdx.x == 0) part[0] = value;
    }
    __syncthreads();
    value = part[0];
    __syncthreads();
    return value;
}

// out[r, c] = x[r, c] minus the mean of row r, plus offset; one block per row.
extern "C" __global__ void __launch_bounds__(256) centre(const float* x, float* out, int64_t columns, float offset) {
    const float* line = x + blockIdx.x * columns;
    float sum = 0.0f;
    for (int64_t c = threadIdx.x; c < columns; c += blockDim.x) sum += line[c];
    const float mean = block_sum(sum) / columns;
    for (int64_t c = threadIdx.x; c < columns; c += blockDim.x) out[blockIdx.x * columns + c] = line[c] - mean + offset;
}
LSQ_EXPORT(centre)

// out[i] = x[threads - 1 - i] within each block, through dynamic shared memory.
extern "C" __global__ void reverse(const float* x, float* out) {
    extern __shared__ unsigned char shared_memory[];
    float* values = reinterpret_cast<float*>(shared_memory);
    const unsigned start = blockIdx.x * blockDim.x;
    values[threadIdx.x] = x[start + threadIdx.x];
#ifdef BARRIER
    __syncthreads();
#endif
    out[start + threadIdx.x] = values[blockDim.x - 1 - threadIdx.x];
}
LSQ_EXPORT(reverse)
