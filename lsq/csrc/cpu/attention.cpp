// Attention over packed rows; lsq/ops/attention.py is the reference.
#include "attention.h"

using namespace lsq;

namespace {

class ForwardWorker : Worker {
public:
    ForwardWorker(const Attention& op, const Case& given, float* rows)
        : Worker(given), op_(op), rows_(rows), context_(kBlock * stride_),
          flags_(heads_.width + 8) {}

    // -> whether a value that was rounded was NaN
    bool run(const Pair& pair) {
        read_keys(pair);
        transpose(pair, k_.get(), k_panels_.get());
        bool missing = false;
        for (int64_t begin = 0; begin < pair.queries; begin += kBlock) {
            const int64_t rows = std::min(kBlock, pair.queries - begin), seen = pair.seen(begin + rows - 1);
            given_.q.read(pair.first + begin, rows, pair.head * heads_.width, heads_.width, queries_.get(), stride_);
            multiply_keys(queries_.get(), k_panels_.get(), rows, seen, scores_.get());
            float shares[kBlock];
            for (int64_t i = 0; i < rows; ++i) {
                shares[i] = softmax(pair, begin + i, seen, scores_.get() + i * given_.wide);
            }
            multiply(Left<false>{scores_.get(), given_.wide}, rows_of(v_.get(), stride_), rows, heads_.width, seen, false,
                     context_.get(), stride_);
            for (int64_t i = 0; i < rows; ++i) {
                missing |= write(pair, begin + i, shares[i], context_.get() + i * stride_);
            }
        }
        return missing;
    }

private:
    // Products x [keys] -> exp(score - largest) after dropout, 0 for keys that are not seen; -> what the context is to
    // be multiplied by.
    float softmax(const Pair& pair, int64_t query, int64_t keys, float* x) {
        const int64_t n = pair.seen(query), row = pair.first + query;
        const float factor = given_.factor;
        float largest = -infinity();
#pragma omp simd reduction(max : largest)
        for (int64_t j = 0; j < n; ++j) {
            x[j] *= factor;
            largest = x[j] > largest ? x[j] : largest;
        }
        float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
        for (int64_t j = 0; j < n; ++j) {
            x[j] = bounded_exponential(x[j] - largest);
            sum += x[j];
        }
        std::fill(x + n, x + std::max(n, keys), 0.0f);
        if (op_.log_sum) op_.log_sum[row * heads_.count + pair.head] = n ? largest + std::log(sum) : -infinity();
        if (heads_.dropout.threshold) draw(row, pair.head, n);
        drop(n, x);
        return n ? given_.v.scale() / sum : 0.0f;
    }

    bool write(const Pair& pair, int64_t query, float share, float* x) {
        const int64_t width = heads_.width, element = ((pair.first + query) * heads_.count + pair.head) * width;
#pragma omp simd
        for (int64_t i = 0; i < width; ++i) x[i] *= share;
        if (rows_) std::memcpy(rows_ + element, x, width * sizeof(float));
        if (!op_.rounded.codes || width % 8) return false;
        return round_row(op_.rounded, element, width, x, flags_.data());
    }

    const Attention& op_;
    float* rows_;  // where the context goes as floats, if anywhere
    AlignedFloats context_;
    std::vector<uint8_t> flags_;
};

// Rounds n numbers, whichever rows they make.
bool round_all(const Coded& coded, int64_t n, const float* x) {
    constexpr int64_t kChunk = 1024;
    return for_rows((n + kChunk - 1) / kChunk, kChunk, [&](int64_t chunk, Scratch& scratch) {
        const int64_t first = chunk * kChunk, count = std::min(kChunk, n - first);
        return static_cast<int>(round_row(coded, first, count, x + first, scratch.flags.data()));
    });
}

}  // namespace

LSQ_OPERATION(Attention, op) {
    const Case given(op.heads);
    const int64_t width = op.heads.width, size = op.heads.rows * op.heads.count * width;
    const bool afterwards = op.rounded.codes && width % 8;  // heads do not begin at bytes of the clipped bits
    std::vector<float> waiting(afterwards && !op.out ? size : 0);
    float* rows = afterwards && !op.out ? waiting.data() : op.out;
    int missing = 0;
#pragma omp parallel reduction(| : missing)
    {
        ForwardWorker worker(op, given, rows);
#pragma omp for schedule(dynamic)
        for (size_t i = 0; i < given.order.size(); ++i) missing |= worker.run(Pair(op.heads, given.order[i]));
    }
    if (afterwards) missing |= round_all(op.rounded, size, rows);
    finish(op.rounded, missing);
}
