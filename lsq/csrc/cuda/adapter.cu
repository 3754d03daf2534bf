// What adapters read of a product's input, and what goes back to it: 8 values a thread.
#include "project_epilogue.cuh"

// -DCODES=1: the input is codes, else floats.
#ifndef CODES
#define CODES 0
#endif

namespace {

constexpr int kThreads = 256;

__device__ __forceinline__ int64_t first_value() {
    return kVector * (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x);
}

__device__ __forceinline__ void add8(const Float* more, float (&x)[kVector]) {
    float y[kVector];
    load8(more, y);
#pragma unroll
    for (int i = 0; i < kVector; ++i) x[i] += y[i];
}

}  // namespace

LSQ_KERNEL __launch_bounds__(kThreads) lsq_adapter_input(const AdapterInput op) {
    const int64_t begin = first_value();
    if (begin >= op.rows * op.columns) return;
    float x[kVector];
#if CODES
    const int8_t* codes = op.x.coded.codes;
    const float* scales = op.x.coded.scale;
    const float scale = scales[op.x.coded.by_row ? begin / op.columns : 0];
    int32_t code[kVector];
    load8(codes + begin, code);
#pragma unroll
    for (int i = 0; i < kVector; ++i) x[i] = static_cast<float>(code[i]) * scale;
#else
    const Float* floats = op.x.floats;
    load8(floats + begin, x);
#endif
    DropoutMask(op.dropout).apply8(begin, x);
    float* values = op.values;
    store8(values + begin, x);
}
LSQ_EXPORT(lsq_adapter_input)

// Adds base [M, N] to the product of adapters, and applies the epilogue.
LSQ_KERNEL __launch_bounds__(kThreads)
lsq_adapt(const Adapt op, In<float> product, Out<uint32_t> ticket) {
    const int64_t begin = first_value();
    const ProjectEnd end{op, nullptr};
    Magnitude largest = 0;
    if (begin < op.rows * op.columns) {
        const Float* base = op.base;
        const float* sums = product;
        float added[kVector], y[kVector];
        load8(sums + begin, added);
        load8(base + begin, y);
        largest = end.write8(begin, added, y);
    }
    end.codes.finish<kThreads>(ticket, largest);
}
LSQ_EXPORT(lsq_adapt)

LSQ_KERNEL __launch_bounds__(kThreads) lsq_adapter_input_gradient(const AdapterInputGradient op) {
    const int64_t begin = first_value();
    if (begin >= op.rows * op.columns) return;
    const float* gradient = op.gradient;
    const Float* added = op.added;
    float x[kVector];
    load8(gradient + begin, x);
    DropoutMask(op.dropout).apply8(begin, x);
    if (added) add8(added + begin, x);
    Float* dx = op.dx;
    store8(dx + begin, x);
}
LSQ_EXPORT(lsq_adapter_input_gradient)
