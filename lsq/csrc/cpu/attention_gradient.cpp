// The gradient of attention over packed rows; lsq/ops/attention.py is the reference.
#include "attention.h"

using namespace lsq;

namespace {

template <class Products>
class BackwardWorker : Worker<Products> {
    using Base = Worker<Products>;
    using Base::given_, Base::heads_, Base::stride_, Base::scores_, Base::queries_, Base::k_, Base::v_;

public:
    BackwardWorker(const AttentionGradient& op, const Case& given, float* dq, float* dkv)
        : Base(given), op_(op), upstream_{{{Coded{}, op.dcontext}, 0, heads_.count * heads_.width}}, dq_to_(dq),
          dkv_to_(dkv), slopes_(kQueryBlock * given.wide), rows_(kQueryBlock * stride_), dq_(kQueryBlock * stride_),
          dk_(stride_ * given.wide), dv_(stride_ * given.wide), turned_(stride_ * given.wide),
          shuffled_(2 * kPanel * given.wide), sums_(given.queries), upstream_rows_(kQueryBlock, stride_, false),
          dscores_(kQueryBlock, given.keys, false), query_columns_(stride_, kQueryBlock, given.q.coded()),
          upstream_columns_(stride_, kQueryBlock, false), value_columns_(given.keys, stride_, given.v.coded()),
          key_rows_(stride_, given.keys, given.k.coded()), pair_rows_(given.keys, kQueryBlock, false) {}

    void run(const Pair& pair) {
        const bool several = pair.keys > kKeyBlock;
        if (several) sum(pair);
        const auto begin = [&](const Block& block) {
            read_keys(block);
            key_rows_.take(k_.get(), stride_, heads_.width, pair.keys_from(block.key));
            wide_ = given_.wide_of(block);
            std::fill_n(dk_.get(), stride_ * wide_, 0.0f);
            std::fill_n(dv_.get(), stride_ * wide_, 0.0f);
        };
        const auto end = [&](const Block& block) {
            const Operand& k = given_.k;
            const int64_t first = (pair.first_key + block.key) * k.columns + pair.head * heads_.width;
            write_turned(dk_, given_.q.scale() * given_.share, pair.keys_from(block.key), dkv_to_ + first + k.column);
            write_turned(dv_, 1.0f, pair.keys_from(block.key), dkv_to_ + first + given_.v.column);
        };
        this->for_blocks(pair, begin, [&](const Block& block) { add(block, several); }, end);
    }

private:
    void read_keys(const Block& block) {
        Base::read_keys(block);
        value_columns_.take(v_.get(), stride_, block.pair.keys_from(block.key), heads_.width);
    }

    // scores_: the block's queries times its keys; slopes_: their gradients times its values.
    void multiply(const Block& block) {
        this->multiply_keys(block);
        this->read(upstream_, block.pair, block.row(), block.queries, rows_);
        upstream_rows_.take(rows_.get(), stride_, block.queries, heads_.width);
        Products::multiply(upstream_rows_, value_columns_, block.queries, block.keys, heads_.width, false,
                           slopes_.get(), given_.wide);
    }

    // The sums of each query's probabilities times their gradients, over all blocks of keys.
    void sum(const Pair& pair) {
        std::fill_n(sums_.begin(), pair.queries, 0.0f);
        const auto body = [&](const Block& block) {
            multiply(block);
            for (int64_t i = 0; i < block.queries; ++i) {
                sums_[block.query + i] += probabilities(block, i, scores_row(i), slopes_row(i));
            }
        };
        this->for_blocks(pair, [&](const Block& block) { read_keys(block); }, body, [](const Block&) {});
    }

    // Adds what the block makes of all gradients; `summed`: sums_ is known.
    void add(const Block& block, bool summed) {
        multiply(block);
        for (int64_t i = 0; i < block.queries; ++i) softmax_gradient(block, i, summed);
        for (int64_t i = block.queries; i < whole_units(block.queries); ++i) {
            std::fill_n(scores_row(i), whole_units(block.keys), 0.0f);
            std::fill_n(slopes_row(i), whole_units(block.keys), 0.0f);
        }
        const int64_t width = heads_.width, wide = given_.wide;
        dscores_.take(slopes_.get(), wide, block.queries, block.keys);
        Products::multiply(dscores_, key_rows_, block.queries, width, block.keys, false, dq_.get(), stride_);
        write_queries(block);
        pair_rows_.take(slopes_.get(), wide, block.keys, block.queries);
        query_columns_.take(queries_.get(), stride_, width, block.queries);
        Products::multiply(query_columns_, pair_rows_, width, block.keys, block.queries, true, dk_.get(), wide_);
        pair_rows_.take(scores_.get(), wide, block.keys, block.queries);
        upstream_columns_.take(rows_.get(), stride_, width, block.queries);
        Products::multiply(upstream_columns_, pair_rows_, width, block.keys, block.queries, true, dv_.get(), wide_);
    }

    float* scores_row(int64_t i) const { return scores_.get() + i * given_.wide; }
    float* slopes_row(int64_t i) const { return slopes_.get() + i * given_.wide; }

    // Of the block's query `i`: products x of it and the keys -> probabilities; products g of its gradient and the
    // values -> the gradients of the probabilities; -> the sum of their products.
    float probabilities(const Block& block, int64_t i, float* x, float* g) {
        const int64_t n = block.seen(i);
        const float log_sum = op_.log_sum[(block.row() + i) * heads_.count + block.pair.head];
        this->draw(block, i);
        this->drop(n, g);
        const Lanes factor = all_lanes(given_.factor), base = all_lanes(log_sum), scale = all_lanes(given_.v.scale());
        Lanes sum = {};
        for_lanes(n, [&](int64_t j, auto seen) {
            Lanes &p = lanes_at(x + j), &slope = lanes_at(g + j);
            p = seen(bounded_exponential(p * factor - base), 0.0f);
            slope = seen(slope * scale, 0.0f);
            sum += p * slope;
        });
        return sum_of_lanes(sum);
    }

    // scores_ -> probabilities after dropout, slopes_ -> the gradient of the scores; 0 for keys that are not seen.
    void softmax_gradient(const Block& block, int64_t i, bool summed) {
        const int64_t n = block.seen(i), all = whole_units(block.keys);
        float *x = scores_row(i), *g = slopes_row(i);
        const float here = probabilities(block, i, x, g);
        const Lanes sum = all_lanes(summed ? sums_[block.query + i] : here);
        for_lanes(n, [&](int64_t j, auto) { lanes_at(g + j) = lanes_at(x + j) * (lanes_at(g + j) - sum); });
        this->drop(n, x);
        std::fill(x + n, x + all, 0.0f);
        std::fill(g + n, g + all, 0.0f);
    }

    void write_queries(const Block& block) const {
        const Operand& q = given_.q;
        const float factor = given_.k.scale() * given_.share, *from = dq_.get();
        float* to = dq_to_ + block.row() * q.columns + q.column + block.pair.head * heads_.width;
        for (int64_t row = 0; row < block.queries; ++row, from += stride_, to += q.columns) {
            if (block.key == 0) std::fill_n(to, heads_.width, 0.0f);
#pragma omp simd
            for (int64_t i = 0; i < heads_.width; ++i) to[i] += from[i] * factor;
        }
    }

    // from [D, keys] * factor -> [keys, D], rows of the tensor of keys.
    void write_turned(const AlignedFloats& from, float factor, int64_t keys, float* to) {
        for (int64_t column = 0; column < heads_.width; column += kPanel) {
            const int64_t width = std::min(kPanel, heads_.width - column);
            transpose_panel(from.get() + column * wide_, wide_, turned_.get(), shuffled_.get());
            for (int64_t row = 0; row < keys; ++row) {
                const float* turned = turned_.get() + row * kPanel;
                float* out = to + row * given_.k.columns + column;
#pragma omp simd
                for (int64_t i = 0; i < width; ++i) out[i] = turned[i] * factor;
            }
        }
    }

    const AttentionGradient& op_;
    Operand upstream_;
    float *dq_to_, *dkv_to_;
    AlignedFloats slopes_, rows_, dq_, dk_, dv_, turned_, shuffled_;
    int64_t wide_ = 0;         // of rows of dk_ and dv_, [D, keys]
    std::vector<float> sums_;  // see sum()
    typename Products::template Left<false> upstream_rows_, dscores_;
    typename Products::template Left<true> query_columns_, upstream_columns_;
    typename Products::template Right<true> value_columns_;
    typename Products::template Right<false> key_rows_, pair_rows_;
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
    with_products([&](auto products) {
#pragma omp parallel
        {
            BackwardWorker<decltype(products)> worker(op, given, dq, keys);
#pragma omp for schedule(dynamic)
            for (size_t i = 0; i < given.order.size(); ++i) worker.run(Pair(op.heads, given.order[i]));
        }
    });
    Ending{op.heads.q, op.dq}.run(op.heads.rows, dq);
    Ending{op.heads.k, op.dkv}.run(op.heads.key_rows, dkv);
}
