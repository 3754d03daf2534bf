// Kernels with planted faults.
#include "emulation.h"

extern "C" __global__ void divergent_barrier(float* out) {
    if (threadIdx.x < 40) __syncthreads();
    out[threadIdx.x] = 1.0f;
}
LSQ_EXPORT(divergent_barrier)

extern "C" __global__ void two_barriers(float* out) {
    if (threadIdx.x < 32) {
        __syncthreads();
    } else {
        __syncthreads();
    }
    out[threadIdx.x] = 1.0f;
}
LSQ_EXPORT(two_barriers)

// Lane 5 of the second warp has left when the others meet.
extern "C" __global__ void finished_lane(unsigned* out) {
    if (threadIdx.x == 37) return;
    out[threadIdx.x] = __ballot_sync(0xffffffff, 1);
}
LSQ_EXPORT(finished_lane)

extern "C" __global__ void different_masks(unsigned* out) {
    out[threadIdx.x] = __shfl_sync(threadIdx.x < 16 ? 0xffffffff : 0xffff0000, threadIdx.x, 20);
}
LSQ_EXPORT(different_masks)

extern "C" __global__ void other_lanes_mask(unsigned* out) {
    out[threadIdx.x] = __any_sync(0xff, threadIdx.x == 3);
}
LSQ_EXPORT(other_lanes_mask)

extern "C" __global__ void different_functions(unsigned* out) {
    if (threadIdx.x % 2) __syncwarp();
    out[threadIdx.x] = __all_sync(0xffffffff, 1);
}
LSQ_EXPORT(different_functions)

extern "C" __global__ void source_not_named(unsigned* out) {
    if (threadIdx.x % 32 < 16) out[threadIdx.x] = __shfl_sync(0xffff, threadIdx.x, 20);
}
LSQ_EXPORT(source_not_named)

extern "C" __global__ void misaligned_vector(const unsigned char* x, float* out, int64_t offset) {
    const unsigned char* address = x + 16 * threadIdx.x + (threadIdx.x == 3 ? offset : 0);
    emulator_check_alignment(address, 16);
    out[threadIdx.x] = reinterpret_cast<const float4*>(address)->x;
}
LSQ_EXPORT(misaligned_vector)

extern "C" __global__ void misaligned_load(const unsigned char* x, float* out) {
    out[threadIdx.x] = *reinterpret_cast<const float*>(x + 1 + 4 * threadIdx.x);
}
LSQ_EXPORT(misaligned_load)

extern "C" __global__ void write_beyond(float* out, int64_t count) { out[threadIdx.x + count] = 1.0f; }
LSQ_EXPORT(write_beyond)

template <typename T>
__device__ T exchange(T value, int64_t count) {
    __shared__ T part[32];
    T* place = part + threadIdx.x + count;
    *place = value;
    __syncthreads();
    return part[0];
}

extern "C" __global__ void write_beyond_shared(float* out, int64_t count) { out[threadIdx.x] = exchange(1.0f, count); }
LSQ_EXPORT(write_beyond_shared)

extern "C" __global__ void write_beyond_dynamic(float* out, int64_t count) {
    extern __shared__ unsigned char shared_memory[];
    float* values = reinterpret_cast<float*>(shared_memory);
    values[threadIdx.x + count] = 1.0f;
    __syncthreads();
    out[threadIdx.x] = values[0];
}
LSQ_EXPORT(write_beyond_dynamic)

// Reads shared memory that nobody wrote.
extern "C" __global__ void unwritten(float* out) {
    __shared__ float values[64];
    extern __shared__ float dynamic[];
    out[threadIdx.x] = threadIdx.x % 2 ? values[threadIdx.x] : dynamic[threadIdx.x];
}
LSQ_EXPORT(unwritten)
