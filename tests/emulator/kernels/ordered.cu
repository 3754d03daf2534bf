// Kernels without faults, whose launches somebody must order.
#include "emulation.h"

extern "C" __global__ void fill(int* out, int64_t value) {
    out[blockIdx.x * blockDim.x + threadIdx.x] = value;
}
LSQ_EXPORT(fill)

extern "C" __global__ void copy(const int* x, int* out) {
    out[blockIdx.x * blockDim.x + threadIdx.x] = x[blockIdx.x * blockDim.x + threadIdx.x];
}
LSQ_EXPORT(copy)

extern "C" __global__ void take_ticket(unsigned* ticket, int* out) {
    out[blockIdx.x] = atomicAdd(ticket, 1u);
}
LSQ_EXPORT(take_ticket)

// A local array with an address, on the thread's own stack.
extern "C" __global__ void reversed(const int* x, int* out) {
    int values[8];
    int* volatile place = values;
    for (int i = 0; i < 8; ++i) place[i] = x[i];
    for (int i = 0; i < 8; ++i) out[i] = place[7 - i];
}
LSQ_EXPORT(reversed)
