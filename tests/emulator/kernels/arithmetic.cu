// Arithmetic that has more than one form.
#include "device.cuh"

LSQ_KERNEL exponentials(In<float> x, Out<float> out, int64_t count) {
    const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i < count) out[i] = bounded_exponential(x[i]);
}
LSQ_EXPORT(exponentials)
