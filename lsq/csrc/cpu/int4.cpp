// Weights of 4 bits in groups; lsq/quant/formats.py has the formulas.
#include "../include/int4.h"
#include "weights.h"

using namespace lsq;

namespace {

constexpr int64_t kGroup = kInt4Group;

using Group = Int4Group;

int32_t squared_error(const float* x, float multiplier) {
    int32_t error = 0;
#pragma omp simd reduction(+ : error)
    for (int64_t i = 0; i < kGroup; ++i) error += squared_parts(x[i], multiplier);
    return error;
}

// Multiplier of least squared error for x [kGroup], in steps: the largest value gets code -8 or is
// clipped a little.
float best_multiplier(const float* x) {
    float high = 0.0f, low = 0.0f;
#pragma omp simd reduction(max : high) reduction(min : low)
    for (int64_t i = 0; i < kGroup; ++i) {
        high = x[i] > high ? x[i] : high;
        low = x[i] < low ? x[i] : low;
    }
    float tried[kTried];
    int32_t errors[kTried];
    for (int less = 0; less < kTried; ++less) {
        tried[less] = tried_multiplier(low, high, less);
        errors[less] = squared_error(x, tried[less]);
    }
    return tried[std::min_element(errors, errors + kTried) - errors];
}

Group rounded(const float* x) {
    Group group;
    const float multiplier = best_multiplier(x);
    group.multiplier = static_cast<int8_t>(multiplier);
#pragma omp simd
    for (int64_t i = 0; i < kGroup / 2; ++i) {
        const int32_t low = static_cast<int32_t>(code_of_four_bits(x[i], multiplier));
        const int32_t high = static_cast<int32_t>(code_of_four_bits(x[i + kGroup / 2], multiplier));
        group.pairs[i] = static_cast<uint8_t>((low & 15) | high << 4);
    }
    return group;
}

}  // namespace

LSQ_EXPORT void lsq_round_int4(const RoundWeight& op) {
    round_weight(op, [q = op.weight.largest](const float* values, int64_t n, float, float step,
                                             int8_t* stored) {
        Group* groups = reinterpret_cast<Group*>(stored);
        int missing = 0;
        for (int64_t first = 0; first < n; first += kGroup) {
            float x[kGroup] = {};
            const int64_t count = std::min(kGroup, n - first);
#pragma omp simd reduction(| : missing)
            for (int64_t i = 0; i < count; ++i) {
                const float ratio = values[first + i] / step;
                missing |= ratio != ratio;
                const float low = ratio < -q ? -q : ratio;
                x[i] = ratio != ratio ? 0.0f : low > q ? q : low;
            }
            groups[first / kGroup] = rounded(x);
        }
        return missing;
    });
}

LSQ_EXPORT void lsq_unpack_int4(const UnpackWeight& op) {
    unpack_weight(op, [](const int8_t* stored, int64_t n, int8_t* codes) {
        const Group* groups = reinterpret_cast<const Group*>(stored);
        for (int64_t first = 0; first < n; first += kGroup) {
            const Group& group = groups[first / kGroup];
            int8_t out[kGroup];
#pragma omp simd
            for (int64_t i = 0; i < kGroup / 2; ++i) {
                const int32_t pair = static_cast<int8_t>(group.pairs[i]);
                out[i] = static_cast<int8_t>((((pair & 15) ^ 8) - 8) * group.multiplier);
                out[i + kGroup / 2] = static_cast<int8_t>((pair >> 4) * group.multiplier);
            }
            std::memcpy(codes + first, out, std::min(kGroup, n - first));
        }
    });
}
