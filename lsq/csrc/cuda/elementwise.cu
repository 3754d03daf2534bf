// What looks at each value by itself: sums of two tensors, copies.
//
// lsq_append copies codes with -DCODES=1, else activations; 16 bytes a thread with -DWORDS=1, where
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

__device__ __forceinline__ int64_t thread_of_grid() {
    return static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
}

#if CODES
using Copied = int8_t;
#else
using Copied = Float;
#endif
#if WORDS
using Unit = uint4;
#else
using Unit = Copied;
#endif
constexpr int64_t kUnit = sizeof(Unit) / sizeof(Copied);

}  // namespace

// The last thread takes what is left over of eights.
LSQ_KERNEL __launch_bounds__(kThreads) lsq_add(const Add op) {
    const Float *left = op.a, *right = op.b;
    Float* sum = op.out;
    const int64_t begin = thread_of_grid() * kVector;
    if (begin + kVector <= op.count) {
        float x[kVector], y[kVector];
        load8(left + begin, x);
        load8(right + begin, y);
#pragma unroll
        for (int i = 0; i < kVector; ++i) x[i] += y[i];
        store8(sum + begin, x);
    } else {
        for (int64_t i = begin; i < op.count; ++i)
            sum[i] = narrow<Float>(widen(left[i]) + widen(right[i]));
    }
}
LSQ_EXPORT(lsq_add)

LSQ_KERNEL __launch_bounds__(kThreads) lsq_append(const Append op) {
#if CODES
    const Copied *before = op.before, *now = op.now;
    Copied* out = op.out;
#else
    const Copied *before = op.before_floats, *now = op.now_floats;
    Copied* out = op.out_floats;
#endif
    const int64_t width = op.columns / kUnit, past = op.past * width, begin = thread_of_grid();
    if (begin >= op.batch * (past + width)) return;
    const int64_t sentence = begin / (past + width), place = begin - sentence * (past + width);
    const Copied* from = place < past ? before + (sentence * past + place) * kUnit
                                      : now + (sentence * width + place - past) * kUnit;
    store_words(out + begin * kUnit, load_words<Unit>(from));
}
LSQ_EXPORT(lsq_append)
