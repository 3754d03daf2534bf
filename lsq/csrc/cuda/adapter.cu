// The input of adapters, their sum with a product, and the input's gradient: 8 values a thread.
#include "project_epilogue.cuh"

// -DCODES=1: the input is codes, else floats.

constexpr int kThreads = 256;

LSQ_KERNEL __launch_bounds__(kThreads) lsq_adapter_input(const AdapterInput op) {
    wait_for_launches();
    const int64_t begin = kVector * thread_of_grid<kThreads>();
    if (begin >= op.rows * op.columns) return;
    float x[kVector];
#if CODES
    const int8_t* codes = op.x.coded.codes;
    const float* scales = op.x.coded.scale;
    const float scale = scales[op.x.coded.by_row ? begin / op.columns : 0];
    int32_t code[kVector];
    load8(codes + begin, code);
    scale8(code, scale, x);
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
    wait_for_launches();
    const int64_t begin = kVector * thread_of_grid<kThreads>();
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
    wait_for_launches();
    const int64_t begin = kVector * thread_of_grid<kThreads>();
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
