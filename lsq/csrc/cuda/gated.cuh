// Operands of gated feed-forward blocks; lsq/ops/gated.py is the reference.
//
// -DACTIVATION is the gate's Activation; -DCODED=1: gate and up are codes, 0: Float.
#pragma once

#include "rounding.cuh"

#include "activations.h"

#ifndef ACTIVATION
#define ACTIVATION 4
#endif
#ifndef CODED
#define CODED 1
#endif

namespace lsq {

constexpr Activation kActivation = static_cast<Activation>(ACTIVATION);

using GateValue = Select<CODED, int8_t, Float>;

struct GateOperand {
    const GateValue* values;
    float scale;

#if CODED
    LSQ_INLINE explicit GateOperand(const Rows& rows)
        : values(rows.coded.codes), scale(rows.coded.scale[0]) {}
#else
    LSQ_INLINE explicit GateOperand(const Rows& rows) : values(rows.floats), scale(1.0f) {}
#endif

    LSQ_INLINE Packed<GateValue> load(int64_t element) const {
        return load_packed(values + element);
    }

    LSQ_INLINE void unpack(const Packed<GateValue>& packed, float (&x)[kVector]) const {
#if CODED
        int32_t code[kVector];
        unpack8(packed, code);
        scale8(code, scale, x);
#else
        unpack8(packed, x);
#endif
    }
};

}  // namespace lsq
