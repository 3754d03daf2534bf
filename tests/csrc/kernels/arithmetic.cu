// Arithmetic that has more than one form.
#include "device.cuh"

// differs[i] says whether bounded_exponential(x) has other bits than exponential(x).
LSQ_KERNEL exponentials(In<float> x, Out<uint8_t> differs, int64_t count) {
    const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= count) return;
    const float found = bounded_exponential(x[i]), wanted = exponential(x[i]);
    differs[i] = found == found || wanted == wanted ? bits_of(found) != bits_of(wanted) : 0;
}
LSQ_EXPORT(exponentials)
