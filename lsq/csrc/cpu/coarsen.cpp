// Codes of fewer bits for some rows; lsq/ops/coarsen.py has the formula.
#include "loops.h"

using namespace lsq;

LSQ_OPERATION(CoarsenRows, op) {
    const int64_t n = op.columns;
#pragma omp parallel for schedule(static) if (op.rows * n > kLittle)
    for (int64_t row = 0; row < op.rows; ++row) {
        const int8_t* codes = op.codes + row * n;
        int8_t* coarse = op.coarse + row * n;
        if (op.unit[row] == 1 && coarse == codes) continue;
        const float unit = op.unit[row], most = static_cast<float>(op.largest / op.unit[row]);
#pragma omp simd
        for (int64_t i = 0; i < n; ++i)
            coarse[i] = static_cast<int8_t>(code_of(codes[i] / unit, most) * unit);
    }
}
