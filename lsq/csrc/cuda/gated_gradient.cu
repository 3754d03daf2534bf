// The gradient of the gate of a feed-forward block, or with -DUP=1 of what it lets through:
// straight through the rounding of it, then sums over rows, then as it is or rounded. M rows, F =
// COLUMNS columns; see gated.cuh.
#include "gated.cuh"
#include "gradient.cuh"

#ifndef UP
#define UP 0
#endif

namespace {

// What a thread reads of a row.
struct Operands {
    PackedRow<Float> gradient;
    PackedRow<GateValue> gate;
#if !UP
    PackedRow<GateValue> up;
#endif
};

}  // namespace

// partial: the block's sums of columns and, after them, what the clip gets.
LSQ_KERNEL __launch_bounds__(kThreads, kSumming)
    lsq_gated_gradient(const GatedGradient op, Out<float> partial) {
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
        Operands found;
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
            if (!has(v)) continue;
            const int64_t element = row * COLUMNS + column_of(v);
            found.gradient.part[v] = load_packed(gradient + element);
            found.gate.part[v] = gate.load(element);
#if !UP
            found.up.part[v] = up.load(element);
#endif
        }
        return found;
    };
    for_rows(op.rows, load, [&](int64_t row, bool inside, const Operands& found) {
        Values g = {};
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
            if (!inside || !has(v)) continue;
            const int64_t element = row * COLUMNS + column_of(v);
            float y[kVector];
            unpack8(found.gradient.part[v], g[v]);
            dropout.apply8(element, g[v]);
            gate.unpack(found.gate.part[v], y);
#if UP
#pragma unroll
            for (int i = 0; i < kVector; ++i) g[v][i] *= activated<kActivation>(y[i]);
#else
            float factor[kVector];
            up.unpack(found.up.part[v], factor);
#pragma unroll
            for (int i = 0; i < kVector; ++i)
                g[v][i] = g[v][i] * factor[i] * activation_slope<kActivation>(y[i]);
#endif
            clip += mask.apply8(element, g[v]);
        }
        sink.add(row, inside, g);
    });
    float* sums = partial + blockIdx.x * (COLUMNS + kPadding);
    sink.bias_sums.write(sums);
    write_block_sum(clip, sums + COLUMNS);
}
LSQ_EXPORT(lsq_gated_gradient)
