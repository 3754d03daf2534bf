// Gradient of the gate of a feed-forward block, or of the up projection with -DUP=1:
// straight-through mask, sums over rows, then floats or codes. M rows, F = COLUMNS columns; see
// gated.cuh.
#include "gated.cuh"
#include "gradient.cuh"

namespace {

struct Operands {
    PackedRow<Float> gradient;
    PackedRow<GateValue> gate;
#if !UP
    PackedRow<GateValue> up;
#endif
};

}  // namespace

// partial: the block's sums of columns, then its part of the clip's gradient.
LSQ_KERNEL __launch_bounds__(kThreads, kSumming)
    lsq_gated_gradient(const GatedGradient op, Out<float> partial) {
    wait_for_launches();
    const GateOperand gate{op.gate};
    const DropoutMask dropout{op.dropout};
    const Float* gradient = op.gradient;
#if UP
    const StraightThrough mask{op.up.coded};
    GradientSink sink{op.dup.floats, op.dup.rounded};
#else
    const GateOperand up{op.up};
    const StraightThrough mask{op.gate.coded};
    GradientSink sink{op.dgate.floats, op.dgate.rounded};
#endif
    float clip = 0.0f;
    const auto load = [&](int64_t row) {
        Operands operands;
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
            if (!has(v)) continue;
            const int64_t element = row * COLUMNS + column_of(v);
            operands.gradient.part[v] = load_packed(gradient + element);
            operands.gate.part[v] = gate.load(element);
#if !UP
            operands.up.part[v] = up.load(element);
#endif
        }
        return operands;
    };
    for_rows(op.rows, load, [&](int64_t row, bool inside, const Operands& operands) {
        Values g = {};
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
            if (!inside || !has(v)) continue;
            const int64_t element = row * COLUMNS + column_of(v);
            float y[kVector];
            unpack8(operands.gradient.part[v], g[v]);
            dropout.apply8(element, g[v]);
            gate.unpack(operands.gate.part[v], y);
#if UP
#pragma unroll
            for (int i = 0; i < kVector; ++i) g[v][i] *= activated<kActivation>(y[i]);
#else
            float factor[kVector];
            up.unpack(operands.up.part[v], factor);
#pragma unroll
            for (int i = 0; i < kVector; ++i)
                g[v][i] = g[v][i] * factor[i] * activation_slope<kActivation>(y[i]);
#endif
            clip += mask.apply8(element, g[v]);
        }
        sink.add(row, inside, g);
    });
    write_partial(sink.bias_sums, clip, partial);
}
LSQ_EXPORT(lsq_gated_gradient)
