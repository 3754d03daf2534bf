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
    out[threadIdx.x] = emulator_load<float4>(address).x;
}
LSQ_EXPORT(misaligned_vector)

extern "C" __global__ void misaligned_load(const unsigned char* x, float* out) {
    out[threadIdx.x] = *reinterpret_cast<const float*>(x + 1 + 4 * threadIdx.x);
}
LSQ_EXPORT(misaligned_load)

extern "C" __global__ void write_beyond(float* out, int64_t count) {
    out[threadIdx.x + count] = 1.0f;
}
LSQ_EXPORT(write_beyond)

template <typename T>
__device__ T exchange(T value, int64_t count) {
    __shared__ T part[32];
    T* place = part + threadIdx.x + count;
    *place = value;
    __syncthreads();
    return part[0];
}

extern "C" __global__ void write_beyond_shared(float* out, int64_t count) {
    out[threadIdx.x] = exchange(1.0f, count);
}
LSQ_EXPORT(write_beyond_shared)

extern "C" __global__ void write_beyond_dynamic(float* out, int64_t count) {
    extern __shared__ unsigned char shared_memory[];
    float* values = reinterpret_cast<float*>(shared_memory);
    values[threadIdx.x + count] = 1.0f;
    __syncthreads();
    out[threadIdx.x] = values[0];
}
LSQ_EXPORT(write_beyond_dynamic)

// Each warp takes what the one before it left, before or after that has written.
extern "C" __global__ void race(float* out, int64_t barriers) {
    __shared__ float values[64];
    for (int turn = 0; turn < 3; ++turn) {
        values[threadIdx.x] = turn;
        __syncthreads();
        out[threadIdx.x] = values[(threadIdx.x + 32) % 64];
        if (barriers) __syncthreads();
    }
}
LSQ_EXPORT(race)

// Two warps write the same.
extern "C" __global__ void equal_values(float* out) {
    __shared__ float value;
    if (threadIdx.x % 32 == 0) value = 1.0f;
    __syncthreads();
    out[threadIdx.x] = value;
}
LSQ_EXPORT(equal_values)

__attribute__((noinline)) int depth_of(volatile int* numbers, int64_t turns) {
    volatile int here[64] = {numbers[0]};
    return turns ? depth_of(here, turns - 1) + here[0] : 0;
}

// What a CPU ends a process for, in the thread 37 of block 1 alone.
extern "C" __global__ void crash(float* out, int64_t kind) {
    out[blockIdx.x * blockDim.x + threadIdx.x] = 1.0f;
    __syncthreads();
    if (blockIdx.x != 1 || threadIdx.x != 37) return;
    volatile int zero = 0;
    if (kind == 0) *reinterpret_cast<volatile int*>(16) = 1;
    if (kind == 1) zero = 100 / zero;
    if (kind == 2) __builtin_trap();
    if (kind == 3) __builtin_abort();
    if (kind == 4) throw 1;
    if (kind == 5) out[0] = depth_of(&zero, 1 << 20);
}
LSQ_EXPORT(crash)

// The last of three blocks to arrive adds up what all left; block 1 crashes before it arrives, if
// that is wanted.
extern "C" __global__ void last_of_three(const float* crashes, unsigned* ticket, float* parts,
                                         float* out) {
    if (blockIdx.x == 1 && crashes[0] != 0.0f) __builtin_trap();
    parts[blockIdx.x] = 1.0f;
    if (atomicAdd(ticket, 1) < 2) return;
    *out = parts[0] + parts[1] + parts[2];
    atomicExch(ticket, 0);
}
LSQ_EXPORT(last_of_three)

// Reads shared memory that nobody wrote.
extern "C" __global__ void unwritten(float* out) {
    __shared__ float values[64];
    extern __shared__ float dynamic[];
    out[threadIdx.x] = threadIdx.x % 2 ? values[threadIdx.x] : dynamic[threadIdx.x];
}
LSQ_EXPORT(unwritten)

// Misuses named barriers: a block of three warps.
extern "C" __global__ void misused(float* out, int64_t fault) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (fault == 0 && warp < 2) emulator_sync_barrier(3, 96);
    if (fault == 1 && warp < 2) emulator_sync_barrier(1, warp ? 64 : 96);
    if (fault == 2 && warp == 1) {
        emulator_arrive_barrier(2, 64);
        emulator_arrive_barrier(2, 64);
    }
    if (fault == 3) emulator_sync_barrier(16, 96);
    if (fault == 4) emulator_arrive_barrier(0, 96);
    if (fault == 5) emulator_sync_barrier(1, 128);
    if (fault == 6) emulator_sync_barrier(1, 40);
    if (fault == 7 && lane < 16) emulator_sync_barrier(1, 96);
    if (fault == 8) emulator_sync_barrier(lane < 16 ? 1 : 2, 96);
    if (fault == 9) {
        if (lane < 16) {
            emulator_sync_barrier(1, 96);
        } else {
            emulator_arrive_barrier(1, 96);
        }
    }
    if (fault == 10 && warp == 2) emulator_arrive_barrier(4, 96);
    if (fault == 11) {
        if (warp < 2) __syncthreads();
        if (warp == 2) emulator_sync_barrier(5, 96);
    }
    out[threadIdx.x] = 1.0f;
}
LSQ_EXPORT(misused)
