// Clip of least squared rounding error. A block takes a row: two passes for the errors of 22 clips
// near the one before; anew, 17 passes for a start and 12 for 131 clips. lsq/ops/calibration.py is
// the reference.
//
// -DWARPS of a block. A sample lies in shared memory or, if too long, in `scratch` [rows, sampled].
#include "reduce.cuh"

#include "clip_search.h"

namespace {

constexpr int kTogether = 11;  // clips whose errors are summed at the same time
constexpr int kMost = 66;      // clips of a search, up to a multiple of that
constexpr int kThreads = WARPS * kWarp;
// Blocks of a multiprocessor: NVRTC's own choice spills.
constexpr int kLeastBlocks = 512 / kThreads;

struct Count {
    LSQ_INLINE static uint32_t join(uint32_t a, uint32_t b) { return a + b; }
};

// Number of NaN and infinities in n values, `step` apart, for every thread.
LSQ_INLINE uint32_t count_unusable(const Float* x, int64_t n, int64_t step) {
    const bool whole = n % kVector == 0 && step == 1;  // and aligned
    uint32_t unusable = 0;
    for (int64_t first = kVector * threadIdx.x; first < n; first += kVector * kThreads) {
        float values[kVector] = {};
        if (whole) load8(x + first, values);
#pragma unroll
        for (int i = 0; i < kVector; ++i) {
            if (!whole && first + i < n) values[i] = widen(x[(first + i) * step]);
            unusable += !(fabsf(values[i]) < infinity());
        }
    }
    return group_reduce<Count, kThreads, kThreads>(unusable);
}

// A block's magnitudes, and memory for its sums.
struct Sample {
    float *values, *sums;  // [count], [kTogether, runs + 1]
    double* totals;        // [kTogether]
    int count, runs;

    // totals[k] = the sum of term(value, k), in the order of clip_search.h. For all threads
    // together.
    template <int K, class Term>
    LSQ_INLINE void sum(const Term& term) const {
        static_assert(kRunLanes == kWarp && K <= kTogether && kTogether <= kWarp,
                      "a warp takes a run, a thread a total");
        const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
        for (int run = warp; run < runs; run += WARPS) {
            float sum[K] = {};
            for (int i = run * kRun + lane; i < min((run + 1) * kRun, count); i += kRunLanes) {
                const float value = values[i];
#pragma unroll
                for (int k = 0; k < K; ++k) sum[k] += term(value, k);
            }
#pragma unroll
            for (int k = 0; k < K; ++k) {
                sum[k] = warp_reduce<Sum>(sum[k]);
                if (lane == 0) sums[k * (runs + 1) + run] = sum[k];
            }
        }
        __syncthreads();
        if (threadIdx.x < K) {
            const float* mine = sums + threadIdx.x * (runs + 1);
            double total = 0.0;
            for (int first = 0; first < runs; first += kJoined) {
                float joined = 0.0f;
                for (int run = first; run < min(first + kJoined, runs); ++run) joined += mine[run];
                total += joined;
            }
            totals[threadIdx.x] = total;
        }
        __syncthreads();
    }

    LSQ_INLINE void sum_above(float clip) const {
        sum<2>([&](float value, int k) { return value > clip ? (k ? 1.0f : value) : 0.0f; });
    }
};

// Tries the clips of a search around `best`, which the first thread has. For all threads together.
LSQ_INLINE void try_clips(const Sample& sample, int search, BestClip& best) {
    __shared__ float around, tried[kMost], reciprocal[kMost];
    if (threadIdx.x == 0) around = best.clip;
    __syncthreads();
    for (int i = threadIdx.x; i < kMost; i += kThreads) {
        tried[i] = candidate(search, i, around);
        reciprocal[i] = best.q / tried[i];
    }
    __syncthreads();
    for (int first = 0; first < kCandidates[search]; first += kTogether) {
        float factor[kTogether];
#pragma unroll
        for (int k = 0; k < kTogether; ++k) factor[k] = reciprocal[first + k];
        sample.sum<kTogether>(
            [&](float value, int k) { return squared_error(value, factor[k], best.q); });
        if (threadIdx.x != 0) continue;
        const int end = min(kTogether, kCandidates[search] - first);
        for (int k = 0; k < end; ++k) best.consider(tried[first + k], sample.totals[k]);
    }
    __syncthreads();
}

// The clip of magnitudes in [0, 1], for the first thread.
LSQ_INLINE float search_anew(const Sample& sample, float q) {
    __shared__ float clip;
    sample.sum_above(0.0f);
    FixedPoint point(sample.totals[0], sample.totals[1], sample.count, q);
    for (int i = 0; i < kIterations; ++i) {
        if (threadIdx.x == 0) clip = point.clip;
        __syncthreads();
        sample.sum_above(clip);
        if (threadIdx.x == 0) point.step(sample.totals[0], sample.totals[1]);
    }
    BestClip best{q, point.start()};
    for (int search = kAnew; search < kAgain; ++search) try_clips(sample, search, best);
    return best.clip;
}

// Whether the least error lies near the earlier clip; the first thread then has its clip in `best`.
LSQ_INLINE bool search_near(const Sample& sample, float before, float largest, BestClip& best) {
    __shared__ bool near;
    try_clips(sample, kAgain, best);
    if (threadIdx.x == 0) near = best.near(before, largest);
    __syncthreads();
    if (near) try_clips(sample, kAgain + 1, best);
    return near;
}

// Rows of zeros get the mean clip of the others. For all threads of one block.
LSQ_INLINE void fill_empty(float* clip, int64_t rows, float smallest) {
    __shared__ double sums[kRunLanes], counts[kRunLanes];
    if (threadIdx.x < kRunLanes) {
        double sum = 0.0, count = 0.0;
        for (int64_t row = threadIdx.x; row < rows; row += kRunLanes) {
            if (clip[row] > smallest) sum += clip[row], count += 1.0;
        }
        sums[threadIdx.x] = sum, counts[threadIdx.x] = count;
    }
    __syncthreads();
    double total = 0.0, count = 0.0;
    for (int lane = 0; lane < kRunLanes; ++lane) total += sums[lane], count += counts[lane];
    if (count == 0.0) return;
    const float mean = static_cast<float>(total / count);
    for (int64_t row = threadIdx.x; row < rows; row += kThreads) {
        if (!(clip[row] > smallest)) clip[row] = mean;
    }
}

}  // namespace

LSQ_KERNEL __launch_bounds__(kThreads, kLeastBlocks)
    lsq_least_error_clip(const LeastErrorClip op, Out<uint32_t> ticket, Out<float> scratch) {
    wait_for_launches();
    extern __shared__ float words[];
    __shared__ double totals[kTogether];
    const int64_t row = blockIdx.x, columns = op.columns, step = op.by_columns ? op.rows : 1;
    const int64_t stride = op.stride * step;
    const int count = static_cast<int>(op.sampled), runs = (count + kRun - 1) / kRun;
    const Float* x = op.x;
    const Float* line = x + row * (op.by_columns ? 1 : columns);
    float *clip = op.clip, *apart = scratch;
    const uint32_t unusable = count_unusable(line, columns, step);
    float* values = apart ? apart + row * count : words + kTogether * (runs + 1);
    const float smallest = op.smallest, q = op.largest;
    float largest = smallest;
    for (int i = threadIdx.x; i < count; i += kThreads) {
        const float magnitude = usable_magnitude(widen(line[i * stride]));
        values[i] = magnitude;
        largest = Maximum::join(largest, magnitude);
    }
    largest = group_reduce<Maximum, kThreads, kThreads>(largest);
    __syncthreads();
    const Sample sample{values, words, totals, count, runs};
    const float* clips_before = op.before;
    const float before = clips_before ? clips_before[row] : 0.0f;
    BestClip best{q, before};
    if (!clips_before || !search_near(sample, before, largest, best)) {
        for (int i = threadIdx.x; i < count; i += kThreads) values[i] /= largest;
        __syncthreads();
        best.clip = search_anew(sample, q) * largest;
    }
    if (threadIdx.x == 0) {
        int64_t* counts = op.unusable;
        counts[row] = unusable;
        clip[row] = Maximum::join(best.clip, smallest);
    }
    bool nothing = false;
    if (last_block<kThreads>(ticket, nothing)) fill_empty(clip, op.rows, smallest);
}
LSQ_EXPORT(lsq_least_error_clip)
