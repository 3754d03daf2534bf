// Weights of 4 bits in groups: rounds under one clip for each row (output channel) or one for all,
// and unpacks int8 codes. N rows, K columns, P rows of codes, a multiple of 16.
// lsq/quant/formats.py is the reference.
#include "int4.cuh"
#include "reduce.cuh"

namespace {

constexpr int kThreads = 256;

struct Minimum {
    LSQ_INLINE static float join(float a, float b) { return a < b ? a : b; }
};

// Multiplier of least squared error for a group; each lane has a value, in steps.
LSQ_INLINE float best_multiplier(float x) {
    const float low = warp_reduce<Minimum>(x < 0.0f ? x : 0.0f),
                high = warp_reduce<Maximum>(x > 0.0f ? x : 0.0f);
    float best = 0.0f;
    int32_t least = 0;
#pragma unroll
    for (int less = 0; less < kTried; ++less) {
        const float tried = tried_multiplier(low, high, less);
        const int32_t error = warp_reduce<Sum>(squared_parts(x, tried));
        if (less == 0 || error < least) best = tried, least = error;
    }
    return best;
}

}  // namespace

// A warp takes a row, so that its scale knows of a NaN; under a single clip the last block poisons
// all scales.
LSQ_KERNEL __launch_bounds__(kThreads) lsq_round_int4(const RoundWeight op, Out<uint32_t> ticket) {
    wait_for_launches();
    static_assert(kInt4Group == kWarp, "a lane takes a value");
    const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
    const float *values = op.weight.values, *clip = op.weight.clip, q = op.weight.largest;
    float* scale = op.weight.scale;
    bool poisoned_all = false;
    for (int64_t row = blockIdx.x * (kThreads / kWarp) + warp; row < op.rows;
         row += gridDim.x * (kThreads / kWarp)) {
        int8_t* stored = op.weight.codes + row * op.stored;
        if (row >= op.valid) {
            for (int64_t i = lane; i < op.stored; i += kWarp) stored[i] = 0;
            if (lane == 0) scale[row] = 1.0f;
            continue;
        }
        const float step = clip[op.clips > 1 ? row : 0] / q;
        const float* value = values + row * op.columns + lane;
        bool missing = false;
        for (int64_t left = op.columns - lane; left > -lane;
             left -= kInt4Group, stored += sizeof(Int4Group)) {
            const float ratio = left > 0 ? *value / step : 0.0f;
            value += kInt4Group;
            missing |= ratio != ratio;
            const float low = ratio < -q ? -q : ratio, x = ratio != ratio ? 0.0f
                                                           : low > q      ? q
                                                                          : low;
            const float multiplier = best_multiplier(x);
            const int32_t code = static_cast<int32_t>(code_of_four_bits(x, multiplier));
            const int32_t other = __shfl_down_sync(kAllLanes, code, kInt4Group / 2);
            if (lane < kInt4Group / 2)
                stored[1 + lane] = static_cast<int8_t>((code & 15) | other << 4);
            if (lane == 0) stored[0] = static_cast<int8_t>(multiplier);
        }
        missing = __any_sync(kAllLanes, missing);
        poisoned_all |= missing;
        if (lane == 0) scale[row] = poisoned(step, missing);
    }
    if (op.clips > 1) return;
    const bool last = last_block<kThreads>(ticket, poisoned_all);
    if (!last || !poisoned_all) return;
    for (int64_t row = threadIdx.x; row < op.valid; row += kThreads) scale[row] = not_a_number();
}
LSQ_EXPORT(lsq_round_int4)

// Stored groups -> codes [P, K], K a multiple of 16. A thread for each group.
LSQ_KERNEL __launch_bounds__(kThreads) lsq_unpack_int4(const UnpackWeight op) {
    wait_for_launches();
    const int64_t groups = (op.columns + kInt4Group - 1) / kInt4Group;
    const int64_t at = thread_of_grid<kThreads>(), row = at / groups, group = at % groups;
    if (row >= op.rows) return;
    const StoredGroup stored(op.weight.codes +
                             (row * op.stored + group * static_cast<int64_t>(sizeof(Int4Group))));
    const Multiplier multiplier = stored.multiplier();
    int8_t* codes = op.codes + (row * op.columns + group * kInt4Group);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        if (group * kInt4Group + half * (kInt4Group / 2) >= op.columns) continue;
        uint32_t four[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) four[i] = multiplier.times(stored.pairs(i) >> 4 * half);
        store_words(codes + half * (kInt4Group / 2),
                    make_uint4(four[0], four[1], four[2], four[3]));
    }
}
LSQ_EXPORT(lsq_unpack_int4)
