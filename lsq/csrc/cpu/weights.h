// Weights as their formats store them; lsq/quant/formats.py has the references. A format exports lsq_round_<name>, and
// where products cannot read what it stores, lsq_unpack_<name>.
#pragma once

#include "rows.h"

namespace lsq {

// Calls round(values, n, step, stored) -> whether a value was NaN, for each row; rows from `valid` on become zeros.
template <class Round>
void round_weight(const RoundWeight& op, const Round& round) {
    const Weight& weight = op.weight;
    int missing_anywhere = 0;
#pragma omp parallel for schedule(static) reduction(| : missing_anywhere)
    for (int64_t row = 0; row < op.rows; ++row) {
        int8_t* stored = weight.codes + row * op.stored;
        if (row >= op.valid) {
            std::memset(stored, 0, op.stored);
            weight.scale[row] = 1.0f;
            continue;
        }
        const float step = weight.clip[op.clips > 1 ? row : 0] / weight.largest;
        const int missing = round(weight.values + row * op.columns, op.columns, step, stored);
        weight.scale[row] = poisoned(step, missing);
        missing_anywhere |= missing;
    }
    if (op.clips == 1 && missing_anywhere) std::fill(weight.scale, weight.scale + op.valid, not_a_number());
}

// Calls unpack(stored, n, codes) for each row.
template <class Unpack>
void unpack_weight(const UnpackWeight& op, const Unpack& unpack) {
#pragma omp parallel for schedule(static)
    for (int64_t row = 0; row < op.rows; ++row) {
        unpack(op.weight.codes + row * op.stored, op.columns, op.codes + row * op.columns);
    }
}

}  // namespace lsq
