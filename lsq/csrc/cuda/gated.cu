// Gated activation of a feed-forward block, M rows of F columns; see gated.cuh.
#include "gated.cuh"

namespace {

constexpr int kThreads = 256, kAtOnce = 2;

LSQ_INLINE void gate8(const GateOperand& gate, const GateOperand& up, const DropoutMask& dropout,
                      int64_t element, const Packed<GateValue>& of_gate,
                      const Packed<GateValue>& of_up, float (&y)[kVector]) {
    float factor[kVector];
    gate.unpack(of_gate, y);
    up.unpack(of_up, factor);
#pragma unroll
    for (int i = 0; i < kVector; ++i) y[i] = activated<kActivation>(y[i]) * factor[i];
    dropout.apply8(element, y);
}

}  // namespace

// Floats or codes under a clip: every thread makes kAtOnce vectors, a block apart.
LSQ_KERNEL __launch_bounds__(kThreads, 2) lsq_gated(const Gated op, Out<uint32_t> ticket) {
    wait_for_launches();
    const GateOperand gate{op.gate}, up{op.up};
    const DropoutMask dropout{op.dropout};
    const CodeSink codes{op.rounded};
    Float* out = op.out;
    const int64_t begin =
        kVector * (static_cast<int64_t>(blockIdx.x) * kAtOnce * kThreads + threadIdx.x);
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
        float y[kVector];
        gate8(gate, up, dropout, element, gates[v], ups[v], y);
        if (out) store8(out + element, y);
        largest = Largest::join(largest, codes.write8(element, y));
    }
    codes.finish<kThreads>(ticket, largest);
}
LSQ_EXPORT(lsq_gated)

// A scale for each row: a block keeps a row in shared memory [F] until its largest magnitude is
// known. Every thread reads its own values.
LSQ_KERNEL __launch_bounds__(kThreads) lsq_gated_rows(const Gated op) {
    wait_for_launches();
    extern __shared__ float4 waiting[];
    const GateOperand gate{op.gate}, up{op.up};
    const DropoutMask dropout{op.dropout};
    float* line = reinterpret_cast<float*>(waiting);
    Float* out = op.out;
    int8_t* codes = op.rounded.codes;
    Magnitude most = 0;
    for (int64_t row = blockIdx.x; row < op.rows; row += gridDim.x) {
        Magnitude largest = 0;
        for (int64_t column = kVector * threadIdx.x; column < op.columns;
             column += kVector * kThreads) {
            const int64_t element = row * op.columns + column;
            float y[kVector];
            gate8(gate, up, dropout, element, gate.load(element), up.load(element), y);
            if (out) store8(out + element, y);
            store8(line + column, y);
            largest = largest8(y, largest);
        }
        largest = group_reduce<Largest, kThreads, kThreads>(largest);
        most = Largest::join(most, largest);
        const GradientScale scale = gradient_scale(float_of(largest), op.rounded.largest);
        if (threadIdx.x == 0) op.rounded.scale[row] = scale.scale;
        for (int64_t column = kVector * threadIdx.x; column < op.columns;
             column += kVector * kThreads) {
            float y[kVector];
            load8(line + column, y);
            store_nearest8(codes + (row * op.columns + column), y, scale.reciprocal);
        }
    }
    uint32_t* seen = reinterpret_cast<uint32_t*>(static_cast<float*>(op.rounded.seen));
    if (seen && threadIdx.x == 0) atomicMax(seen, most);
}
LSQ_EXPORT(lsq_gated_rows)
