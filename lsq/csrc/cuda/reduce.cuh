// Sums and maxima over a warp, a group of threads that shares a row, a block, and all blocks.
//
// Every result is the same whatever the order in which threads run: the partners of each addition
// are fixed.
#pragma once

#include "vectors.cuh"

namespace lsq {

constexpr unsigned kAllLanes = 0xffffffffu;

struct Sum {
    __device__ __forceinline__ static float join(float a, float b) { return a + b; }
    __device__ __forceinline__ static int32_t join(int32_t a, int32_t b) { return a + b; }
};
// Of magnitudes as bits: NaN counts as larger than infinity.
struct Largest {
    __device__ __forceinline__ static uint32_t join(uint32_t a, uint32_t b) {
        return a > b ? a : b;
    }
};
// Of magnitudes of floats: NaN if one is.
struct LargestMagnitude {
    __device__ __forceinline__ static float join(float a, float b) {
#ifdef LSQ_EMULATOR
        return emulator_larger_magnitude(a, b);
#else
        float larger;
        asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(fabsf(a)), "f"(fabsf(b)));
        return larger;
#endif
    }
};
struct Maximum {
    __device__ __forceinline__ static float join(float a, float b) { return a > b ? a : b; }
};

// Over GROUP neighbouring threads of a warp.
template <class Operation, int GROUP = kWarp, class T>
__device__ __forceinline__ T warp_reduce(T value) {
#pragma unroll
    for (int distance = GROUP / 2; distance; distance /= 2) {
        value = Operation::join(value, __shfl_xor_sync(kAllLanes, value, distance));
    }
    return value;
}

// Over GROUP consecutive threads of a block of THREADS; every thread gets its group's result. Where
// a group is larger than a warp, all threads of the block must call this.
template <class Operation, int GROUP, int THREADS, class T>
__device__ __forceinline__ T group_reduce(T value) {
    static_assert(THREADS % GROUP == 0 && THREADS % kWarp == 0,
                  "groups fill a block of whole warps");
    static_assert(GROUP % kWarp == 0 || kWarp % GROUP == 0, "groups are whole warps, or fill one");
    if constexpr (GROUP <= kWarp) return warp_reduce<Operation, GROUP>(value);
    value = warp_reduce<Operation>(value);
    __shared__ T part[THREADS / kWarp];
    const int warp = threadIdx.x / kWarp, first = threadIdx.x / GROUP * (GROUP / kWarp);
    __syncthreads();  // the values of a call before have been read
    if (threadIdx.x % kWarp == 0) part[warp] = value;
    __syncthreads();
    value = part[first];
#pragma unroll
    for (int i = 1; i < GROUP / kWarp; ++i) value = Operation::join(value, part[first + i]);
    return value;
}

// Whether any thread of the block says so.
template <int THREADS>
__device__ __forceinline__ bool block_any(bool found) {
    return group_reduce<Largest, THREADS, THREADS>(static_cast<uint32_t>(found)) != 0;
}

// Whether this block is the last to call of `count` blocks with the same ticket, which is left at
// zero. What the others wrote before is there to read. All threads of the block must call this.
__device__ __forceinline__ bool last_of(uint32_t* ticket, uint32_t count) {
    __shared__ bool last;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        last = atomicAdd(ticket, 1u) + 1 == count;
        if (last) atomicExch(ticket, 0u);
    }
    __syncthreads();
    __threadfence();
    return last;
}

// Whether this block is the last of all to call; `found` then says whether any thread of any block
// has found something. Leaves the two words of `ticket` at zero for the next launch. What the other
// blocks wrote before is there for the last one to read. All threads of all blocks must call this.
template <int THREADS>
__device__ __forceinline__ bool last_block(uint32_t* ticket, bool& found) {
    __shared__ uint32_t last, flag;
    const bool here = block_any<THREADS>(found);
    if (threadIdx.x == 0) {
        if (here) atomicExch(ticket + 1, 1u);
        __threadfence();
        last = atomicAdd(ticket, 1u) + 1 == gridDim.x * gridDim.y * gridDim.z;
        flag = 0;
        if (last) {
            flag = atomicExch(ticket + 1, 0u);
            atomicExch(ticket, 0u);
        }
    }
    __syncthreads();
    __threadfence();
    found = flag;
    return last;
}

// Writes scale [1] once all blocks have said whether they met a NaN. All threads of all blocks must
// call this.
template <int THREADS>
__device__ __forceinline__ void finish_scale(uint32_t* ticket, bool missing, float clip,
                                             float largest, float* scale) {
    const bool last = last_block<THREADS>(ticket, missing);
    if (last && threadIdx.x == 0) scale[0] = poisoned(clip / largest, missing);
}

}  // namespace lsq
