// The middle of a gated feed-forward block: M rows, F = COLUMNS columns; see gated.cuh.
#include "gated.cuh"
#include "rows.cuh"

namespace {

struct Operands {
    PackedRow<GateValue> gate, up;
};

}  // namespace

LSQ_KERNEL __launch_bounds__(kThreads, kMedium) lsq_gated(const Gated op, Out<uint32_t> ticket) {
    const GateOperand gate{op.gate}, up{op.up};
    const DropoutMask dropout{op.dropout};
    const CodeSink codes{op.rounded};
    Float* out = op.out;
    Magnitude largest = 0;
    const auto load = [&](int64_t row) {
        Operands found;
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
            if (!has(v)) continue;
            found.gate.part[v] = gate.load(row * COLUMNS + column_of(v));
            found.up.part[v] = up.load(row * COLUMNS + column_of(v));
        }
        return found;
    };
    for_rows(op.rows, load, [&](int64_t row, bool inside, const Operands& found) {
        Values y = {};
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
            if (!inside || !has(v)) continue;
            const int64_t element = row * COLUMNS + column_of(v);
            float factor[kVector];
            gate.unpack(found.gate.part[v], y[v]);
            up.unpack(found.up.part[v], factor);
#pragma unroll
            for (int i = 0; i < kVector; ++i) y[v][i] = activated<kActivation>(y[v][i]) * factor[i];
            dropout.apply8(element, y[v]);
            if (out) store8(out + element, y[v]);
            if (!op.rounded.by_row) largest = Largest::join(largest, codes.write8(element, y[v]));
        }
        if (!op.rounded.by_row) return;
        const float most = row_largest(y), scale = write_nearest(row, inside, y, most, codes.q, codes.codes);
        if (inside && threadIdx.x % LANES == 0) op.rounded.scale[row] = scale;
        largest = Largest::join(largest, magnitude_of(most));
    });
    codes.finish<kThreads>(ticket, largest);
}
LSQ_EXPORT(lsq_gated)
