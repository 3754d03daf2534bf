// Reductions over a warp, a group of threads that shares a row, a block, and all blocks, in a fixed
// order.
#pragma once

#include "vectors.cuh"

namespace lsq {

constexpr unsigned kAllLanes = 0xffffffffu;

struct Sum {
    LSQ_INLINE static float join(float a, float b) { return a + b; }
    LSQ_INLINE static int32_t join(int32_t a, int32_t b) { return a + b; }
};
// Magnitudes as bits: NaN is larger than infinity.
struct Largest {
    LSQ_INLINE static uint32_t join(uint32_t a, uint32_t b) { return a > b ? a : b; }
};
// Magnitudes of floats: NaN if one is.
struct LargestMagnitude {
    LSQ_INLINE static float join(float a, float b) {
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
    LSQ_INLINE static float join(float a, float b) { return a > b ? a : b; }
};

// Over GROUP neighbouring threads of a warp.
template <class Operation, int GROUP = kWarp, class T>
LSQ_INLINE T warp_reduce(T value) {
#pragma unroll
    for (int distance = GROUP / 2; distance; distance /= 2) {
        value = Operation::join(value, __shfl_xor_sync(kAllLanes, value, distance));
    }
    return value;
}

// Over GROUP consecutive threads of a block of THREADS, for all of them. If groups are larger than
// a warp, all threads of the block must call this.
template <class Operation, int GROUP, int THREADS, class T>
LSQ_INLINE T group_reduce(T value) {
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

// The largest of `largest` and the magnitudes of x.
LSQ_INLINE Magnitude largest8(const float (&x)[kVector], Magnitude largest) {
#pragma unroll
    for (int i = 0; i < kVector; ++i) largest = Largest::join(largest, magnitude_of(x[i]));
    return largest;
}

// Sum of one number of each thread of a block, for the first thread. All threads must call this.
template <int THREADS>
LSQ_INLINE double block_total(double x) {
    __shared__ double part[THREADS];
    part[threadIdx.x] = x;
    for (int half = THREADS / 2; half > 0; half /= 2) {
        __syncthreads();
        if (static_cast<int>(threadIdx.x) < half) part[threadIdx.x] += part[threadIdx.x + half];
    }
    return part[threadIdx.x];
}

// Whether `flag` is true in any thread of the block.
template <int THREADS>
LSQ_INLINE bool block_any(bool flag) {
    return group_reduce<Largest, THREADS, THREADS>(static_cast<uint32_t>(flag)) != 0;
}

// Whether the calling threads, which sync() joins, are the last of `count` groups to call with the
// same ticket, which is left at zero. They may read the others' earlier writes. All must call this,
// one of them as `first`; `last` is in shared memory and is theirs alone.
template <class Sync>
LSQ_INLINE bool last_of(uint32_t* ticket, uint32_t count, bool first, bool& last,
                        const Sync& sync) {
    __threadfence();
    sync();
    if (first) {
        last = atomicAdd(ticket, 1u) + 1 == count;
        if (last) atomicExch(ticket, 0u);
    }
    sync();
    __threadfence();
    return last;
}

// The same for blocks. All threads of the block must call this.
LSQ_INLINE bool last_of(uint32_t* ticket, uint32_t count) {
    __shared__ bool last;
    return last_of(ticket, count, threadIdx.x == 0, last, [] { __syncthreads(); });
}

// Whether this block is the last of all to call; `flag_of_all` then says whether any thread of any
// block had it set. Leaves the two words of `ticket` at zero. The last block may read the others'
// earlier writes. All threads of all blocks must call this.
template <int THREADS>
LSQ_INLINE bool last_block(uint32_t* ticket, bool& flag_of_all) {
    __shared__ uint32_t last, flag;
    const bool here = block_any<THREADS>(flag_of_all);
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
    flag_of_all = flag;
    return last;
}

// Writes scale [1], NaN if any thread is `missing`. All threads of all blocks must call this.
template <int THREADS>
LSQ_INLINE void finish_scale(uint32_t* ticket, bool missing, float clip, float largest,
                             float* scale) {
    const bool last = last_block<THREADS>(ticket, missing);
    if (last && threadIdx.x == 0) scale[0] = poisoned(clip / largest, missing);
}

}  // namespace lsq
