// The middle of a gated feed-forward block and its gradient; lsq/ops/gated.py has the formulas.
#include "activation_kinds.h"
#include "loops.h"

using namespace lsq;

namespace {

// Row `row` of n values, which may stand in `scratch`.
const float* values_of(const Rows& rows, int64_t row, int64_t n, float* scratch) {
    if (!rows.coded.codes) return rows.floats + row * n;
    const int8_t* codes = rows.coded.codes + row * n;
    const float scale = rows.coded.scale[0];
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) scratch[i] = static_cast<float>(codes[i]) * scale;
    return scratch;
}

// One of the two gradients, with the sums that blocks of rows leave.
class Side {
public:
    Side(const Rows& of, const HeadsGradient& end, const Blocks& blocks, int64_t n)
        : of_(of.coded), end_(end), n_(n), clips_(blocks.count, 0.0), sink_(blocks, n, end.floats, end.rounded, end.sum) {}

    // g [n] is row `row` of the gradient before the mask. Changes it.
    void add(int64_t block, int64_t row, float* g) {
        clips_[block] += straight_through(of_, row * n_, n_, g);
        sink_.add(block, row, g);
    }

    void finish() const {
        sink_.finish();
        write_sum(clips_, of_.clip_factor, end_.clip);
    }

private:
    const Coded& of_;
    const HeadsGradient& end_;
    int64_t n_;
    std::vector<double> clips_;
    GradientSink sink_;
};

}  // namespace

LSQ_OPERATION(Gated, op) {
    const int64_t n = op.columns;
    const int missing = for_rows(op.rows, n, [&](int64_t row, Scratch& scratch) -> int {
        float* y = op.out ? op.out + row * n : scratch.a.data();
        const float *gate = values_of(op.gate, row, n, y), *up = values_of(op.up, row, n, scratch.b.data());
        with_activation(op.activation, [=](auto kind) {
#pragma omp simd
            for (int64_t i = 0; i < n; ++i) y[i] = activated<kind>(gate[i]) * up[i];
        });
        apply(op.dropout, row * n, n, y, scratch.words.data());
        return op.rounded.codes ? round_row(op.rounded, row * n, n, y, scratch.flags.data()) : 0;
    });
    finish(op.rounded, missing);
}

LSQ_OPERATION(GatedGradient, op) {
    const int64_t n = op.columns;
    const Blocks blocks(op.rows);
    Side of_gate(op.gate, op.dgate, blocks, n), of_up(op.up, op.dup, blocks, n);
#pragma omp parallel
    {
        Scratch scratch(n), values(n);
#pragma omp for schedule(static)
        for (int64_t block = 0; block < blocks.count; ++block) {
            for (int64_t row = blocks.begin(block); row < blocks.end(block); ++row) {
                float *dgate = scratch.a.data(), *dup = scratch.b.data();
                const float* gate = values_of(op.gate, row, n, values.a.data());
                const float* up = values_of(op.up, row, n, values.b.data());
                std::memcpy(dup, op.gradient + row * n, n * sizeof(float));
                apply(op.dropout, row * n, n, dup, scratch.words.data());
                with_activation(op.activation, [=](auto kind) {
#pragma omp simd
                    for (int64_t i = 0; i < n; ++i) {
                        const float g = dup[i];
                        dgate[i] = g * up[i] * activation_slope<kind>(gate[i]);
                        dup[i] = g * activated<kind>(gate[i]);
                    }
                });
                of_gate.add(block, row, dgate);
                of_up.add(block, row, dup);
            }
        }
    }
    of_gate.finish();
    of_up.finish();
}
