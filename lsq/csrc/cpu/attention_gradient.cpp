// The gradient of attention over packed rows; lsq/ops/attention.py is the reference.
#include "attention.h"

using namespace lsq;

namespace {

class BackwardWorker : Worker<AttentionGradient> {
public:
    BackwardWorker(const Case<AttentionGradient>& given, float* dq, float* dkv)
        : Worker(given), dq_rows_(dq), dkv_rows_(dkv), v_panels_(given.most * stride_), slopes_(kBlock * given.wide),
          upstream_(kBlock * stride_), dq_(kBlock * stride_), dk_(given.most * stride_), dv_(given.most * stride_) {}

    void run(const Pair& pair) {
        const int64_t width = op_.width, at = pair.head * width, wide = given_.wide;
        read_keys(pair);
        transpose(pair, k_.get(), k_panels_.get());
        transpose(pair, v_.get(), v_panels_.get());
        std::fill(dk_.get(), dk_.get() + pair.keys * stride_, 0.0f);
        std::fill(dv_.get(), dv_.get() + pair.keys * stride_, 0.0f);
        for (int64_t begin = 0; begin < pair.queries; begin += kBlock) {
            const int64_t first = pair.first + begin, rows = std::min(kBlock, pair.queries - begin);
            const int64_t seen = pair.seen(begin + rows - 1);
            given_.q.read(first, rows, at, width, queries_.get(), stride_);
            Operand{kFloats, op_.dcontext, op_.heads * width, 0}.read(first, rows, at, width, upstream_.get(), stride_);
            multiply_keys(queries_.get(), k_panels_.get(), rows, seen, scores_.get());
            multiply_keys(upstream_.get(), v_panels_.get(), rows, seen, slopes_.get());
            for (int64_t i = 0; i < rows; ++i) {
                softmax_gradient(pair, begin + i, seen, scores_.get() + i * wide, slopes_.get() + i * wide);
            }
            multiply(Left<false>{slopes_.get(), wide}, rows_of(k_.get(), stride_), rows, width, seen, false, dq_.get(),
                     stride_);
            multiply(Left<true>{slopes_.get(), wide}, rows_of(queries_.get(), stride_), seen, width, rows, true,
                     dk_.get(), stride_);
            multiply(Left<true>{scores_.get(), wide}, rows_of(upstream_.get(), stride_), seen, width, rows, true,
                     dv_.get(), stride_);
            write(dq_.get(), given_.k.scale() * given_.share, rows,
                  dq_rows_ + first * op_.q_columns + op_.q_column + at, op_.q_columns);
        }
        float* to = dkv_rows_ + pair.first_key * op_.k_columns + at;
        write(dk_.get(), given_.q.scale() * given_.share, pair.keys, to + op_.k_column, op_.k_columns);
        write(dv_.get(), 1.0f, pair.keys, to + op_.v_column, op_.k_columns);
    }

private:
    static constexpr Coded kFloats{};

    // Products x of the query and keys -> probabilities after dropout; products g of the gradient and values -> the
    // gradient of the scores. 0 for keys that are not seen.
    void softmax_gradient(const Pair& pair, int64_t query, int64_t keys, float* x, float* g) {
        const int64_t n = pair.seen(query), row = pair.first + query;
        const float factor = given_.factor, log_sum = op_.log_sum[row * op_.heads + pair.head];
        const float scale = given_.v.scale();
        if (op_.dropout.threshold) draw(row, pair.head, n);
        drop(n, g);
        float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
        for (int64_t j = 0; j < n; ++j) {
            x[j] = bounded_exponential(x[j] * factor - log_sum);
            g[j] *= scale;
            sum += x[j] * g[j];
        }
#pragma omp simd
        for (int64_t j = 0; j < n; ++j) g[j] = x[j] * (g[j] - sum);
        drop(n, x);
        std::fill(x + n, x + std::max(n, keys), 0.0f);
        std::fill(g + n, g + std::max(n, keys), 0.0f);
    }

    void write(const float* from, float factor, int64_t rows, float* to, int64_t to_stride) const {
        for (int64_t row = 0; row < rows; ++row, from += stride_, to += to_stride) {
#pragma omp simd
            for (int64_t i = 0; i < op_.width; ++i) to[i] = from[i] * factor;
        }
    }

    float *dq_rows_, *dkv_rows_;
    AlignedFloats v_panels_, slopes_, upstream_, dq_, dk_, dv_;
};

// What becomes of the gradient [rows, columns] of a tensor: straight through its rounding, then to where it is wanted.
struct Ending {
    const Coded& coded;
    float* floats;
    const RoundedGradient& rounded;
    float *sum, *clip;
    float clip_factor;

    void run(int64_t rows, int64_t n, const float* gradient) const {
        if (!floats && !rounded.codes && !sum && !clip) return;
        const Blocks blocks(rows);
        std::vector<double> clips(blocks.count, 0.0);
        GradientSink sink(blocks, n, floats, rounded, sum);
        for_blocks(blocks, n, [&](int64_t block, int64_t row, Scratch& scratch) {
            float* g = scratch.a.data();
            std::memcpy(g, gradient + row * n, n * sizeof(float));
            clips[block] += straight_through(coded, row * n, n, g);
            sink.add(block, row, g, scratch);
        });
        sink.finish();
        write_sum(clips, clip_factor, clip);
    }
};

}  // namespace

// dq and dkv: float32, where gradients stand before their ends; dkv is null where dq holds all.
LSQ_EXPORT void lsq_AttentionGradient(const AttentionGradient& op, float* dq, float* dkv) {
    const Case<AttentionGradient> given(op);
#pragma omp parallel
    {
        BackwardWorker worker(given, dq, dkv ? dkv : dq);
#pragma omp for schedule(dynamic)
        for (size_t i = 0; i < given.order.size(); ++i) worker.run(Pair(op, given.order[i]));
    }
    Ending{op.q, op.dq, op.dq_rounded, op.dq_sum, op.dq_clip, op.dq_factor}.run(op.rows, op.q_columns, dq);
    Ending{op.k, op.dkv, op.dkv_rounded, op.dkv_sum, op.dkv_clip, op.dkv_factor}.run(op.key_rows, op.k_columns, dkv);
}
