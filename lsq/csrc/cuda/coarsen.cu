// Codes of fewer bits for some rows, eight of a row in a thread; lsq/ops/coarsen.py is the
// reference.
#include "vectors.cuh"

namespace {

constexpr int kThreads = 256;

}  // namespace

LSQ_KERNEL __launch_bounds__(kThreads) lsq_coarsen_rows(const CoarsenRows op) {
    wait_for_launches();
    const int8_t *codes = op.codes, *units = op.unit;
    const int64_t begin = thread_of_grid<kThreads>() * kVector;
    if (begin >= op.rows * op.columns) return;
    const int8_t unit = units[begin / op.columns];
    const float step = unit, most = static_cast<float>(op.largest / unit);
    int32_t code[kVector];
    load8(codes + begin, code);
    int8_t coarse[kVector];
#pragma unroll
    for (int i = 0; i < kVector; ++i)
        coarse[i] = static_cast<int8_t>(code_of(static_cast<float>(code[i]) / step, most) * unit);
    store8(op.coarse + begin, coarse);
}
LSQ_EXPORT(lsq_coarsen_rows)
