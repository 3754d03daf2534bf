// Appends the keys and values of a step to those of the steps before.
#include "rows.h"

using namespace lsq;

namespace {

// Each sentence has `past` values, and gets `step` more.
template <class T>
void append(int64_t batch, int64_t past, int64_t step, const T* before, const T* now, T* out) {
#pragma omp parallel for schedule(static)
    for (int64_t sentence = 0; sentence < batch; ++sentence) {
        T* to = out + sentence * (past + step);
        std::copy_n(before + sentence * past, past, to);
        std::copy_n(now + sentence * step, step, to + past);
    }
}

}  // namespace

LSQ_OPERATION(Append, op) {
    const int64_t past = op.past * op.columns;
    if (op.out) {
        append<int8_t>(op.batch, past, op.columns, op.before, op.now, op.out);
    } else {
        append<float>(op.batch, past, op.columns, op.before_floats, op.now_floats, op.out_floats);
    }
}
