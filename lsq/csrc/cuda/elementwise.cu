// Adds two tensors; appends.
//
// lsq_append copies codes with -DCODES=1, else activations; 16 bytes a thread with -DWORDS=1, if
// rows are multiples of that, else one value.
#include "vectors.cuh"

#ifndef CODES
#define CODES 0
#endif
#ifndef WORDS
#define WORDS 0
#endif

namespace {

constexpr int kThreads = 256;

using Copied = Select<CODES, int8_t, Float>;
using Unit = Select<WORDS, uint4, Copied>;
constexpr int64_t kUnit = sizeof(Unit) / sizeof(Copied);

}  // namespace

LSQ_KERNEL __launch_bounds__(kThreads) lsq_add(const Add op) {
    wait_for_launches();
    const Float *left = op.a, *right = op.b;
    Float* sum = op.out;
    const int64_t begin = thread_of_grid<kThreads>() * kVector;
    if (begin + kVector <= op.count) {
        float x[kVector];
        load8(left + begin, x);
        add8(right + begin, x);
        store8(sum + begin, x);
    } else {
        for (int64_t i = begin; i < op.count; ++i)
            sum[i] = narrow<Float>(widen(left[i]) + widen(right[i]));
    }
}
LSQ_EXPORT(lsq_add)

LSQ_KERNEL __launch_bounds__(kThreads) lsq_append(const Append op) {
    wait_for_launches();
#if CODES
    const Copied *before = op.before, *now = op.now;
    Copied* out = op.out;
#else
    const Copied *before = op.before_floats, *now = op.now_floats;
    Copied* out = op.out_floats;
#endif
    const int64_t width = op.columns / kUnit, past = op.past * width,
                  begin = thread_of_grid<kThreads>();
    if (begin >= op.batch * (past + width)) return;
    const int64_t sentence = begin / (past + width), at = begin - sentence * (past + width);
    const Copied* from = at < past ? before + (sentence * past + at) * kUnit
                                   : now + (sentence * width + at - past) * kUnit;
    store_words(out + begin * kUnit, load_words<Unit>(from));
}
LSQ_EXPORT(lsq_append)
