// Rounds activations to codes under one clip; lsq/ops/rounding.py is the reference. Every thread
// rounds kAtOnce vectors, a block apart.
#include "rounding.cuh"

namespace {

constexpr int kThreads = 256, kAtOnce = 4;

}  // namespace

LSQ_KERNEL __launch_bounds__(kThreads, 2) lsq_round(const Round op, Out<uint32_t> ticket) {
    wait_for_launches();
    const Float* x = op.x;
    const CodeSink codes{op.rounded};
    const int64_t begin =
        kVector * (static_cast<int64_t>(blockIdx.x) * kAtOnce * kThreads + threadIdx.x);
    Packed<Float> loaded[kAtOnce] = {};
#pragma unroll
    for (int v = 0; v < kAtOnce; ++v) {
        const int64_t element = begin + v * kThreads * kVector;
        if (element < op.count) loaded[v] = load_packed(x + element);
    }
    Magnitude largest = 0;
#pragma unroll
    for (int v = 0; v < kAtOnce; ++v) {
        const int64_t element = begin + v * kThreads * kVector;
        if (element >= op.count) continue;
        float values[kVector];
        unpack8(loaded[v], values);
        largest = Largest::join(largest, codes.write8(element, values));
    }
    codes.finish<kThreads>(ticket, largest);
}
LSQ_EXPORT(lsq_round)
