// The gradient of attention over packed rows; lsq/ops/attention.py is the reference.
#include <atomic>

#include "attention.h"

using namespace lsq;

namespace {

template <class Products>
class BackwardWorker : Worker<Products> {
    using Base = Worker<Products>;
    using Base::given_, Base::heads_, Base::stride_, Base::scores_;

public:
    BackwardWorker(const AttentionGradient& op, const Case& given, float* dq, float* dkv)
        : Base(given), op_(op), upstream_{{{Coded{}, op.dcontext}, 0, heads_.count * heads_.width}},
          dq_to_(dq), dkv_to_(dkv), slopes_(kQueryBlock * given.wide), dq_(kQueryBlock * stride_),
          dk_(stride_ * given.wide), dv_(stride_ * given.wide), sums_(given.each * given.queries),
          upstream_rows_(kQueryBlock, stride_, false), dscores_(kQueryBlock, given.keys, false),
          query_columns_(stride_, kQueryBlock, given.q.coded()),
          upstream_columns_(stride_, kQueryBlock, false),
          value_columns_(given.keys, stride_, given.v.coded()),
          key_rows_(stride_, given.keys, given.k.coded()),
          pair_rows_(given.keys, kQueryBlock, false) {}

    // dbias [heads of the pair, distances]: gets the sums of score gradients; null without biases.
    void run(const Pair& pair, double* dbias) {
        dbias_ = dbias;
        const bool several = pair.keys > pair.block;
        if (several) sum(pair);
        const auto begin = [&](const Block& block) {
            read_keys(block);
            this->keys(given_.k, block, [&](auto k) { key_rows_.take(k, heads_.width, k.rows); });
            wide_ = given_.wide_of(block);
            std::fill_n(dk_.get(), stride_ * wide_, 0.0f);
            std::fill_n(dv_.get(), stride_ * wide_, 0.0f);
        };
        const auto end = [&](const Block& block) {
            const Operand& k = given_.k;
            const int64_t first = (pair.first_key + block.key) * k.columns + this->key_column(pair);
            write_transposed(dk_, given_.q.scale() * given_.share, pair.keys_from(block.key),
                             dkv_to_ + first + k.column);
            write_transposed(dv_, this->keep(), pair.keys_from(block.key),
                             dkv_to_ + first + given_.v.column);
        };
        this->for_blocks(pair, begin, [&](const Block& block) { add(block, several); }, end);
    }

private:
    void read_keys(const Block& block) {
        Base::read_keys(block);
        this->keys(given_.v, block, [&](auto v) { value_columns_.take(v, v.rows, heads_.width); });
    }

    // scores_: queries times keys; slopes_: gradients of contexts times values.
    void multiply(const Block& block) {
        this->multiply_keys(block);
        this->queries(upstream_, block,
                      [&](auto rows) { upstream_rows_.take(rows, rows.rows, heads_.width); });
        Products::multiply(upstream_rows_, value_columns_, block.queries, block.keys, heads_.width,
                           false, slopes_.get(), given_.wide);
    }

    // Sums each query's probabilities times their gradients over all blocks of keys.
    void sum(const Pair& pair) {
        std::fill(sums_.begin(), sums_.end(), 0.0f);
        const auto body = [&](const Block& block) {
            multiply(block);
            for (int64_t i = 0; i < block.queries; ++i) {
                sum_of(block, i) += probabilities(block, i, scores_row(i), slopes_row(i));
            }
        };
        this->for_blocks(
            pair, [&](const Block& block) { read_keys(block); }, body, [](const Block&) {});
    }

    void add_bias_gradient(const Block& block, int64_t i) const {
        double* to = dbias_ + block.pair.head % given_.each * heads_.bias.distances;
        const float* slopes = slopes_row(i);
        this->distances(block, i, [=](int64_t j, int64_t index) { to[index] += slopes[j]; });
    }

    float& sum_of(const Block& block, int64_t i) {
        return sums_[block.pair.head % given_.each * given_.queries + block.query + i];
    }

    // Adds the block's part of all gradients; `summed`: sums_ is known.
    void add(const Block& block, bool summed) {
        multiply(block);
        dscores_.start(block.keys);
        for (int64_t i = 0; i < block.queries; ++i) {
            softmax_gradient(block, i, summed);
            if (dbias_) add_bias_gradient(block, i);
        }
        for (int64_t i = block.queries; i < whole_units(block.queries); ++i) {
            std::fill_n(scores_row(i), whole_units(block.keys), 0.0f);
            std::fill_n(slopes_row(i), whole_units(block.keys), 0.0f);
        }
        Products::multiply(dscores_, key_rows_, block.queries, heads_.width, block.keys, false,
                           dq_.get(), stride_);
        write_queries(block);
        add_keys(block, given_.q, query_columns_, slopes_, dk_);
        add_keys(block, upstream_, upstream_columns_, scores_, dv_);
    }

    // to [D, keys] += the block's rows of `from`, transposed, times `pairs`.
    void add_keys(const Block& block, const Operand& from,
                  typename Products::template Left<true>& columns, const AlignedFloats& pairs,
                  const AlignedFloats& to) {
        const int64_t width = heads_.width;
        this->queries(from, block, [&](auto rows) { columns.take(rows, width, rows.rows); });
        pair_rows_.take(Whole{pairs.get(), given_.wide}, block.keys, block.queries);
        Products::multiply(columns, pair_rows_, width, block.keys, block.queries, true, to.get(),
                           wide_);
    }

    float* scores_row(int64_t i) const { return scores_.get() + i * given_.wide; }
    float* slopes_row(int64_t i) const { return slopes_.get() + i * given_.wide; }

    // Query `i`: products x with keys -> probabilities; products g of its gradient with values ->
    // the gradients of probabilities. -> the sum of their products
    float probabilities(const Block& block, int64_t i, float* x, float* g) {
        const int64_t n = block.seen(i);
        const float log_sum = op_.log_sum[(block.row() + i) * heads_.count + block.pair.head];
        this->draw(block, i, 0, n);
        this->add_bias(block, i, x);
        this->hide(block, i, x, -infinity());
        this->hide(block, i, g, 0.0f);
        const Lanes factor = all_lanes(given_.left_factor()), base = all_lanes(log_sum);
        const Lanes scale = all_lanes(given_.v.scale() * this->keep());
        Lanes sum = {};
        const auto kept = this->kept();
        for_lanes(n, [&](int64_t j, auto seen) {
            Lanes &p = lanes_at(x + j), &slope = lanes_at(g + j);
            p = seen(bounded_exponential(p * factor - base), 0.0f);
            slope = seen(kept(j, slope) * scale, 0.0f);
            sum += p * slope;
        });
        return sum_of_lanes(sum);
    }

    // scores_ -> probabilities after dropout, slopes_ and dscores_ -> gradients of scores; 0 for
    // hidden keys.
    void softmax_gradient(const Block& block, int64_t i, bool summed) {
        const int64_t n = block.seen(i);
        float *x = scores_row(i), *g = slopes_row(i);
        const float here = probabilities(block, i, x, g);
        const Lanes sum = all_lanes(summed ? sum_of(block, i) : here);
        const auto kept = this->kept();
        const auto row = dscores_.row(i);
        const auto slope_at = [&](int64_t j) {
            Lanes &p = lanes_at(x + j), &slope = lanes_at(g + j);
            slope = j < n ? p * (slope - sum) : Lanes{};
            p = j < n ? kept(j, p) : Lanes{};
            return slope;
        };
        for (int64_t j = 0; j < whole_units(block.keys); j += 2 * kLanes) {
            const Lanes low = slope_at(j);
            row.put(j, low, slope_at(j + kLanes));
        }
    }

    void write_queries(const Block& block) const {
        const Operand& q = given_.q;
        const float factor = given_.k.scale() * given_.share, *from = dq_.get();
        float* to = dq_to_ + block.row() * q.columns + q.column + this->column(block.pair);
        for (int64_t row = 0; row < block.queries; ++row, from += stride_, to += q.columns) {
            const bool opens = block.opens();
#pragma omp simd
            for (int64_t i = 0; i < heads_.width; ++i)
                to[i] = (opens ? 0.0f : to[i]) + from[i] * factor;
        }
    }

    // from [D, keys] * factor -> rows [keys, D] of the tensor of keys.
    void write_transposed(const AlignedFloats& from, float factor, int64_t keys, float* to) {
        for (int64_t key = 0; key < keys; key += kLanes) {
            for (int64_t column = 0; column < heads_.width; column += kLanes) {
                Lanes block[kLanes];
                const float* at = from.get() + column * wide_ + key;
                for (int64_t i = 0; i < kLanes; ++i) block[i] = lanes_at(at + i * wide_) * factor;
                transpose(block);
                for (int64_t i = 0; i < std::min(kLanes, keys - key); ++i) {
                    store_lanes(to + (key + i) * given_.k.columns + column, block[i],
                                heads_.width - column);
                }
            }
        }
    }

    const AttentionGradient& op_;
    Operand upstream_;
    float *dq_to_, *dkv_to_;
    double* dbias_ = nullptr;
    AlignedFloats slopes_, dq_, dk_, dv_;
    int64_t wide_ = 0;         // of rows of dk_ and dv_, [D, keys]
    std::vector<float> sums_;  // see sum(); [heads, queries]
    typename Products::template Left<false> upstream_rows_, dscores_;
    typename Products::template Left<true> query_columns_, upstream_columns_;
    typename Products::template Right<true> value_columns_;
    typename Products::template Right<false> key_rows_, pair_rows_;
};

// Gradients of biases by pair, added up in the order of sentences.
class BiasGradient {
public:
    BiasGradient(const AttentionGradient& op, const Case& given)
        : bias_(op.heads.bias), heads_(op.heads.count), to_(op.dbias),
          each_(given.each * bias_.distances), partial_(to_ ? given.order.size() * each_ : 0, 0.0) {
    }

    double* of_pair(int64_t number) { return to_ ? partial_.data() + number * each_ : nullptr; }

    void finish() const {
        if (!to_) return;
        std::vector<double> sums(bias_.buckets * heads_, 0.0);
        const int64_t lines =
            static_cast<int64_t>(partial_.size()) / std::max<int64_t>(bias_.distances, 1);
        for (int64_t line = 0; line < lines; ++line) {
            const double* from = partial_.data() + line * bias_.distances;
            for (int64_t i = 0; i < bias_.distances; ++i)
                sums[bias_.bucket[i] * heads_ + line % heads_] += from[i];
        }
        std::copy(sums.begin(), sums.end(), to_);
    }

private:
    const PositionBias& bias_;
    int64_t heads_;
    float* to_;
    int64_t each_;  // numbers of a pair
    std::vector<double> partial_;
};

// Straight-through gradient of a tensor [rows, columns], in place, then its sinks. Any thread runs
// any group of rows; sums are added in order at the end.
class GradientEpilogue {
public:
    GradientEpilogue(const Projected& heads, const SummedGradient& to, const Blocks& groups,
                     float* gradient)
        : heads_(heads), to_(to), gradient_(gradient),
          wanted_(to.floats || to.rounded.codes || to.sum || to.clip), clips_(groups.count, 0.0),
          sink_(groups, heads.columns, to.floats == gradient ? nullptr : to.floats, to.rounded,
                to.sum) {}

    void run(int64_t group, int64_t first, int64_t last) {
        if (!wanted_) return;
        const int64_t n = heads_.columns;
        for (int64_t row = first; row < last; ++row) {
            float* g = gradient_ + row * n;
            clips_[group] += straight_through(heads_.rows.coded, row * n, n, g);
            sink_.add(group, row, g, g);
        }
    }

    void finish() const {
        if (!wanted_) return;
        sink_.finish();
        write_sum(clips_, heads_.rows.coded.clip_factor, to_.clip);
    }

private:
    const Projected& heads_;
    const SummedGradient& to_;
    float* gradient_;
    bool wanted_;
    std::vector<double> clips_;
    GradientSink sink_;
};

}  // namespace

// dq and dkv: float32 gradients before their epilogues; dkv is null where dq holds all. The thread
// that makes the last pair of a group of sentences applies the epilogue while the group's rows are
// in its caches.
LSQ_EXPORT void lsq_AttentionGradient(const AttentionGradient& op, float* dq, float* dkv) {
    const Heads& heads = op.heads;
    const Case given(heads, heads.group, kBackwardKeys);
    const Blocks& groups = given.groups;
    float* keys = dkv ? dkv : dq;
    const int64_t behind = heads.key_cu_seqlens[heads.sentences], columns = heads.k.columns;
    std::fill(keys + behind * columns, keys + heads.key_rows * columns, 0.0f);
    BiasGradient of_biases(op, given);
    GradientEpilogue of_queries(heads.q, op.dq, groups, dq), of_keys(heads.k, op.dkv, groups, dkv);
    std::vector<std::atomic<int64_t>> left(groups.count);
    for (int64_t group = 0; group < groups.count; ++group) left[group] = given.pairs(group);
    const auto end = [&](int64_t group) {
        const auto row = [&](const int32_t* cu_seqlens, int64_t sentence, int64_t rows) -> int64_t {
            return sentence > heads.sentences ? rows : cu_seqlens[sentence];
        };
        const int64_t first = groups.begin(group), last = groups.end(group);
        of_queries.run(group, row(heads.cu_seqlens, first, heads.rows),
                       row(heads.cu_seqlens, last, heads.rows));
        of_keys.run(group, row(heads.key_cu_seqlens, first, heads.key_rows),
                    row(heads.key_cu_seqlens, last, heads.key_rows));
    };
    with_products([&](auto products) {
#pragma omp parallel
        {
            BackwardWorker<decltype(products)> worker(op, given, dq, keys);
#pragma omp for schedule(dynamic)
            for (size_t i = 0; i < given.order.size(); ++i) {
                worker.run(given.pair(given.order[i]), of_biases.of_pair(given.order[i]));
                const int64_t group = given.group_of(given.order[i]);
                if (--left[group] == 0) end(group);
            }
        }
    });
    of_biases.finish();
    of_queries.finish();
    of_keys.finish();
}
