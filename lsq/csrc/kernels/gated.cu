// The middle of a gated feed-forward block: every thread makes kAtOnce vectors, which are a block apart so that neighbours
// read neighbours. See gated.cuh.
#include "gated.cuh"

namespace {

constexpr int kThreads = 256, kAtOnce = 2;

}  // namespace

LSQ_KERNEL __launch_bounds__(kThreads, 2) lsq_gated(const Gated op, Out<uint32_t> ticket) {
    const GateOperand gate{op.gate}, up{op.up};
    const DropoutMask dropout{op.dropout};
    const CodeSink codes{op.rounded};
    Float* out = op.out;
    const int64_t begin = kVector * (static_cast<int64_t>(blockIdx.x) * kAtOnce * kThreads + threadIdx.x);
    Packed<GateValue> gates[kAtOnce] = {}, ups[kAtOnce] = {};
#pragma unroll
    for (int v = 0; v < kAtOnce; ++v) {
        const int64_t element = begin + v * kThreads * kVector;
        if (element >= op.count) continue;
        gates[v] = gate.load(element);
        ups[v] = up.load(element);
    }
    Magnitude largest = 0;
#pragma unroll
    for (int v = 0; v < kAtOnce; ++v) {
        const int64_t element = begin + v * kThreads * kVector;
        if (element >= op.count) continue;
        float y[kVector], factor[kVector];
        gate.unpack(gates[v], y);
        up.unpack(ups[v], factor);
#pragma unroll
        for (int i = 0; i < kVector; ++i) y[i] = activated<kActivation>(y[i]) * factor[i];
        dropout.apply8(element, y);
        if (out) store8(out + element, y);
        largest = Largest::join(largest, codes.write8(element, y));
    }
    codes.finish<kThreads>(ticket, largest);
}
LSQ_EXPORT(lsq_gated)
