// Kernels with planted faults; `fault` chooses one, 0 none.
#include "reduce.cuh"
#include "tensor_core.cuh"

// out [threads] = neighbours of x [threads], by shared memory.
LSQ_KERNEL neighbours(In<float> x, Out<float> out, int64_t fault) {
    __shared__ float values[64];
    const int at = static_cast<int>(threadIdx.x);
    values[at] = x[at + (fault == 1 ? 1 : 0)];             // 1: beyond x
    if (fault == 2 ? at < 40 : fault != 3) __syncthreads();  // 2: not all, 3: none
    const int other = fault == 4 ? at + 1 : (at + 1) % 64;  // 4: beyond the array
    const float found = values[other];
    if (fault == 5 && at == 0) values[63] = 0.0f;  // which others read
    out[at] = found;
    if (fault == 6) *reinterpret_cast<float*>(out.address + 4 * at + 2) = 0.0f;
}
LSQ_EXPORT(neighbours)

// out [32] = neighbours in a warp, by shared memory and by a shuffle.
LSQ_KERNEL lanes(Out<int32_t> out, int64_t fault) {
    __shared__ int32_t values[32];
    const int at = static_cast<int>(threadIdx.x);
    values[at] = at;
    if (fault != 1) __syncwarp();
    const int32_t near = values[(at + 1) % 32];
    if (fault == 2 && at == 3) return;
    const unsigned mask = fault == 3 ? 0xffffu : kAllLanes;
    if (fault == 4 && at % 2) return;
    out[at] = near + __shfl_xor_sync(fault == 4 ? 0x55555555u : mask, at, fault == 4 ? 1 : 2);
}
LSQ_EXPORT(lanes)

// Constraints: of a register that is read, too, but named as written alone.
LSQ_KERNEL constraints(Out<int32_t> out) {
    int32_t sum;
#ifdef LSQ_EMULATOR
    sum = 0;
#else
    asm volatile("add.s32 %0, %0, 1;" : "=r"(sum));
#endif
    out[threadIdx.x] = sum;
}
LSQ_EXPORT(constraints)

#ifdef WIDTHS
// Of a register of another width.
LSQ_KERNEL widths(Out<int32_t> out, int64_t given) {
    int32_t sum;
#ifdef LSQ_EMULATOR
    sum = 0;
#else
    asm volatile("add.s32 %0, %1, 1;" : "=r"(sum) : "l"(given));
#endif
    out[threadIdx.x] = sum;
}
LSQ_EXPORT(widths)
#endif
