// Kernels without faults: block sums through shared memory, warp shuffles, dynamic shared memory,
// tickets.
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
extern "C" __global__ void __launch_bounds__(256)
    centre(const float* x, float* out, int64_t columns, float offset) {
    const float* line = x + blockIdx.x * columns;
    float sum = 0.0f;
    for (int64_t c = threadIdx.x; c < columns; c += blockDim.x) sum += line[c];
    const float mean = block_sum(sum) / columns;
    for (int64_t c = threadIdx.x; c < columns; c += blockDim.x)
        out[blockIdx.x * columns + c] = line[c] - mean + offset;
}
LSQ_EXPORT(centre)

// out[i] = x[threads - 1 - i] within each block, through dynamic shared memory.
extern "C" __global__ void reverse(const float* x, float* out) {
    extern __shared__ unsigned char shared_memory[];
    float* values = reinterpret_cast<float*>(shared_memory);
    const unsigned start = blockIdx.x * blockDim.x;
    values[threadIdx.x] = x[start + threadIdx.x];
#if BARRIER
    __syncthreads();
#endif
    out[start + threadIdx.x] = values[blockDim.x - 1 - threadIdx.x];
}
LSQ_EXPORT(reverse)

// out[block, thread] = 1 + its place, counted by hand; grids and blocks of three dimensions.
extern "C" __global__ void places(float* out) {
    const unsigned block = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
    const unsigned thread = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
    const unsigned place = block * blockDim.x * blockDim.y * blockDim.z + thread;
    out[place] += 1.0f + place;
}
LSQ_EXPORT(places)

// out[function, lane] of one warp.
extern "C" __global__ void exchanges(int* out) {
    const unsigned all = 0xffffffff;
    const int lane = threadIdx.x;
    int* results = out + lane;
    results[0 * 32] = __shfl_sync(all, lane, (lane + 5) % 32);
    results[1 * 32] = __shfl_sync(all, lane, 3, 8);
    results[2 * 32] = __shfl_up_sync(all, lane, 2, 16);
    results[3 * 32] = __shfl_down_sync(all, lane, 2, 16);
    results[4 * 32] = __shfl_xor_sync(all, lane, 9);
    results[5 * 32] = __ballot_sync(all, lane % 3 == 0);
    results[6 * 32] = __any_sync(all, lane == 7) + 2 * __any_sync(all, lane == 32);
    results[7 * 32] = __all_sync(all, lane < 32) + 2 * __all_sync(all, lane < 31);
    // Halves of a warp part and meet again.
    if (lane < 16) {
        results[8 * 32] = __shfl_sync(0x0000ffff, lane, 4);
    } else {
        results[8 * 32] = __shfl_sync(0xffff0000, lane, 20);
    }
    __syncwarp();
}
LSQ_EXPORT(exchanges)

// The last block to arrive sums up what all blocks left: total[0] = sum of partial[b] = sum of b +
// 1.
extern "C" __global__ void ticket_sum(float* partial, unsigned* ticket, float* total) {
    __shared__ bool last;
    if (threadIdx.x == 0) {
        partial[blockIdx.x] = 1.0f + blockIdx.x;
        __threadfence();
        last = atomicAdd(ticket, 1) == gridDim.x - 1;
    }
    __syncthreads();
    if (!last || threadIdx.x > 0) return;
    float sum = 0.0f;
    for (unsigned block = 0; block < gridDim.x; ++block) sum += partial[block];
    *total = sum;
    atomicExch(ticket, 0);
}
LSQ_EXPORT(ticket_sum)

extern "C" __global__ void narrow(const float* x, uint16_t* bfloat16, int64_t count) {
    const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
    if (i >= count) return;
    bfloat16[i] = emulator_float_to_bfloat16(x[i]);
}
LSQ_EXPORT(narrow)

extern "C" __global__ void many_barriers(float* out) {
    __shared__ float value;
    for (int round = 0; round < 10; ++round) {
        if (static_cast<int>(threadIdx.x) == round) value = round;
        __syncthreads();
    }
    out[blockIdx.x * blockDim.x + threadIdx.x] = value;
}
LSQ_EXPORT(many_barriers)
