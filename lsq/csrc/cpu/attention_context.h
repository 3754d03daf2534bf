// Contexts of a pair's queries, and where they are written.
#pragma once

#include "attention.h"

namespace lsq {

class Contexts {
public:
    // `rows`: the context as floats, or null. All sums are `unit` times as large.
    Contexts(const Attention& op, const Case& given, float* rows, float unit)
        : op_(op), heads_(given.heads), rows_(rows), unit_(unit), factor_(given.v.scale()),
          stride_(given.stride), context_(given.queries * stride_), sums_(given.queries * kLanes),
          flags_(heads_.width + 8) {
        if (heads_.dropout.threshold) factor_ *= heads_.dropout.keep;
    }

    void start(const Pair& pair) { std::fill_n(sums_.get(), pair.queries * kLanes, 0.0f); }

    // A query's context, times exp(largest score), and the sum of its probabilities in lanes.
    float* row(int64_t query) const { return context_.get() + query * stride_; }
    Lanes& sum(int64_t query) const { return lanes_at(sums_.get() + query * kLanes); }

    void shrink(int64_t query, float factor) const {
        scale(query, factor);
        sum(query) *= factor;
    }

    // -> the largest magnitude
    Magnitude write(const Pair& pair, int64_t query, float largest) {
        const int64_t width = heads_.width, row = pair.first + query,
                      index = row * heads_.count + pair.head;
        const bool blind = Block(pair, query, 0).seen(0) == 0;
        const float total = sum_of_lanes(sum(query));
        float* x = this->row(query);
        scale(query, blind ? 0.0f : factor_ / total);
        if (op_.log_sum)
            op_.log_sum[index] = blind ? -infinity() : largest + std::log(total / unit_);
        if (rows_) std::memcpy(rows_ + index * width, x, width * sizeof(float));
        if (!op_.rounded.codes || width % 8) return 0;
        return round_row(op_.rounded, index * width, width, x, flags_.data());
    }

private:
    void scale(int64_t query, float factor) const {
        float* x = row(query);
        const int64_t width = heads_.width;
#pragma omp simd
        for (int64_t i = 0; i < width; ++i) x[i] *= factor;
    }

    const Attention& op_;
    const Heads& heads_;
    float* rows_;
    float unit_, factor_;
    int64_t stride_;
    AlignedFloats context_, sums_;
    std::vector<uint8_t> flags_;
};

}  // namespace lsq
