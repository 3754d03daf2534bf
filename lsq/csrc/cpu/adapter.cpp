// The input of adapters, and its gradient.
#include "loops.h"

using namespace lsq;

LSQ_OPERATION(AdapterInput, op) {
    const int64_t n = op.columns;
    const Coded& coded = op.x.coded;
    for_rows(op.rows, n, [&](int64_t row, Scratch& scratch) {
        float* values = op.values + row * n;
        if (coded.codes) {
            decode(coded.codes + row * n, n, coded.scale[coded.by_row ? row : 0], values);
        } else {
            std::memcpy(values, op.x.floats + row * n, n * sizeof(float));
        }
        apply(op.dropout, row * n, n, values, scratch.words.data());
        return 0;
    });
}

LSQ_OPERATION(AdapterInputGradient, op) {
    const int64_t n = op.columns;
    for_rows(op.rows, n, [&](int64_t row, Scratch& scratch) {
        float* dx = op.dx + row * n;
        std::memcpy(dx, op.gradient + row * n, n * sizeof(float));
        apply(op.dropout, row * n, n, dx, scratch.words.data());
        if (op.added) add_to(op.added + row * n, n, dx);
        return 0;
    });
}
