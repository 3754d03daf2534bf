// The gradient of attention over packed rows; lsq/ops/attention.py is the reference.
#include "attention.h"

using namespace lsq;

namespace {

class BackwardWorker : Worker {
public:
    BackwardWorker(const AttentionGradient& op, const Case& given, float* dq, float* dkv)
        : Worker(given), op_(op), upstream_rows_{{{Coded{}, op.dcontext}, 0, heads_.count * heads_.width}}, dq_rows_(dq), dkv_rows_(dkv), v_panels_(given.most * stride_), slopes_(kBlock * given.wide),
          upstream_(kBlock * stride_), dq_(kBlock * stride_), dk_(given.most * stride_), dv_(given.most * stride_) {}

    void run(const Pair& pair) {
        const Operand &q = given_.q, &k = given_.k;
        const int64_t width = heads_.width, at = pair.head * width, wide = given_.wide;
        read_keys(pair);
        transpose(pair, k_.get(), k_panels_.get());
        transpose(pair, v_.get(), v_panels_.get());
        std::fill(dk_.get(), dk_.get() + pair.keys * stride_, 0.0f);
        std::fill(dv_.get(), dv_.get() + pair.keys * stride_, 0.0f);
        for (int64_t begin = 0; begin < pair.queries; begin += kBlock) {
            const int64_t first = pair.first + begin, rows = std::min(kBlock, pair.queries - begin);
            const int64_t seen = pair.seen(begin + rows - 1);
            q.read(first, rows, at, width, queries_.get(), stride_);
            upstream_rows_.read(first, rows, at, width, upstream_.get(), stride_);
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
            write(dq_.get(), k.scale() * given_.share, rows,
                  dq_rows_ + first * q.columns + q.column + at, q.columns);
        }
        float* to = dkv_rows_ + pair.first_key * k.columns + at;
        write(dk_.get(), q.scale() * given_.share, pair.keys, to + k.column, k.columns);
        write(dv_.get(), 1.0f, pair.keys, to + given_.v.column, k.columns);
    }

private:
    // Products x of the query and keys -> probabilities after dropout; products g of the gradient and values -> the
    // gradient of the scores. 0 for keys that are not seen.
    void softmax_gradient(const Pair& pair, int64_t query, int64_t keys, float* x, float* g) {
        const int64_t n = pair.seen(query), row = pair.first + query;
        const float factor = given_.factor, log_sum = op_.log_sum[row * heads_.count + pair.head];
        const float scale = given_.v.scale();
        if (heads_.dropout.threshold) draw(row, pair.head, n);
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
            for (int64_t i = 0; i < heads_.width; ++i) to[i] = from[i] * factor;
        }
    }

    const AttentionGradient& op_;
    Operand upstream_rows_;
    float *dq_rows_, *dkv_rows_;
    AlignedFloats v_panels_, slopes_, upstream_, dq_, dk_, dv_;
};

// What becomes of the gradient [rows, columns] of a tensor: straight through its rounding, then to where it is wanted.
struct Ending {
    const Projected& heads;
    const HeadsGradient& to;

    void run(int64_t rows, const float* gradient) const {
        if (!to.floats && !to.rounded.codes && !to.sum && !to.clip) return;
        const int64_t n = heads.columns;
        const Blocks blocks(rows);
        std::vector<double> clips(blocks.count, 0.0);
        GradientSink sink(blocks, n, to.floats, to.rounded, to.sum);
        for_blocks(blocks, n, [&](int64_t block, int64_t row, Scratch& scratch) {
            float* g = scratch.a.data();
            std::memcpy(g, gradient + row * n, n * sizeof(float));
            clips[block] += straight_through(heads.rows.coded, row * n, n, g);
            sink.add(block, row, g, scratch);
        });
        sink.finish();
        write_sum(clips, heads.rows.coded.clip_factor, to.clip);
    }
};

}  // namespace

// dq and dkv: float32, where gradients stand before their ends; dkv is null where dq holds all.
LSQ_EXPORT void lsq_AttentionGradient(const AttentionGradient& op, float* dq, float* dkv) {
    const Case given(op.heads);
    float* keys = dkv ? dkv : dq;
    const int64_t end = op.heads.key_starts[op.heads.sentences], columns = op.heads.k.columns;
    std::fill(keys + end * columns, keys + op.heads.key_rows * columns, 0.0f);
#pragma omp parallel
    {
        BackwardWorker worker(op, given, dq, keys);
#pragma omp for schedule(dynamic)
        for (size_t i = 0; i < given.order.size(); ++i) worker.run(Pair(op.heads, given.order[i]));
    }
    Ending{op.heads.q, op.dq}.run(op.heads.rows, dq);
    Ending{op.heads.k, op.dkv}.run(op.heads.key_rows, dkv);
}
