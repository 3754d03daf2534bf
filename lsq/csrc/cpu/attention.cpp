// Attention over packed rows, with a running maximum and sum (FlashAttention-2, Dao 2023); lsq/ops/attention.py is the
// reference.
#include "attention.h"

using namespace lsq;

namespace {

constexpr int64_t kFew = 4 * kUnit;  // keys whose probabilities stay in the first cache

template <class Products>
class ForwardWorker : Worker<Products> {
    using Base = Worker<Products>;
    using Base::given_, Base::heads_, Base::stride_, Base::scores_;

public:
    ForwardWorker(const Attention& op, const Case& given, float* rows)
        : Base(given), op_(op), rows_(rows), context_(given.queries * stride_), sums_(given.queries * kLanes),
          largest_(given.queries), flags_(heads_.width + 8),
          probabilities_(kQueryBlock, kFew, false), values_(stride_, given.keys, given.v.coded()) {}

    // -> whether a value that was rounded was NaN
    bool run(const Pair& pair) {
        std::fill_n(largest_.begin(), pair.queries, -infinity());
        std::fill_n(sums_.get(), pair.queries * kLanes, 0.0f);
        const auto begin = [&](const Block& block) {
            this->read_keys(block);
            this->keys(given_.v, block, [&](auto v) { values_.take(v, heads_.width, v.rows); });
        };
        this->for_blocks(pair, begin, [&](const Block& block) { add(block); }, [](const Block&) {});
        bool missing = false;
        for (int64_t query = 0; query < pair.queries; ++query) missing |= write(pair, query);
        return missing;
    }

private:
    // Adds what the block's keys make of the context.
    void add(const Block& block) {
        this->multiply_keys(block);
        for (int64_t i = 0; i < block.queries; ++i) find_largest(block, i);
        for (int64_t first = 0; first == 0 || first < block.keys; first += kFew) {
            const int64_t keys = std::min(kFew, block.keys - first);
            probabilities_.start(keys);
            for (int64_t i = 0; i < block.queries; ++i) softmax(block, i, first, keys);
            Products::multiply(probabilities_, values_, block.queries, heads_.width, keys, block.key || first,
                               context_.get() + block.query * stride_, stride_, first);
        }
    }

    // The largest score of the block's query `i`. Where it is a new one, what was summed before shrinks.
    void find_largest(const Block& block, int64_t i) {
        const float* x = scores_.get() + i * given_.wide;
        const int64_t query = block.query + i;
        const float before = largest_[query];
        Lanes most = all_lanes(-infinity());
        for_lanes(block.seen(i), [&](int64_t j, auto seen) {
            most = larger_lanes(seen(lanes_at(x + j), -infinity()), most);
        });
        const float here = largest_lane(most) * given_.factor, largest = here > before ? here : before;
        if (block.key && largest != before) {
            const float shrink = bounded_exponential(before - largest);
            scale_context(query, shrink);
            lanes_at(sums_.get() + query * kLanes) *= shrink;
        }
        largest_[query] = largest;
    }

    // Products of the block's query `i` and so many keys of the block -> exp(score - largest) after dropout, 0 for keys
    // that are not seen.
    void softmax(const Block& block, int64_t i, int64_t first, int64_t keys) {
        const float* x = scores_.get() + i * given_.wide + first;
        const int64_t n = std::clamp<int64_t>(block.seen(i) - first, 0, keys), query = block.query + i;
        this->draw(block, i, first, n);
        const Lanes factor = all_lanes(given_.factor), base = all_lanes(largest_[query]);
        Lanes& to = lanes_at(sums_.get() + query * kLanes);
        Lanes sum = to;
        const auto kept = this->kept();
        const auto row = probabilities_.row(i);
        const auto one = [&](int64_t j) {
            if (j >= n) return Lanes{};
            const Lanes all = bounded_exponential(lanes_at(x + j) * factor - base);
            const Lanes p = j + kLanes <= n ? all : first_lanes(all, n - j, 0.0f);
            sum += p;
            return kept(j, p);
        };
        for (int64_t j = 0; j < whole_units(keys); j += 2 * kLanes) {
            const Lanes low = one(j);
            row.put(j, low, one(j + kLanes));
        }
        to = sum;
    }

    void scale_context(int64_t query, float factor) {
        float* x = context_.get() + query * stride_;
#pragma omp simd
        for (int64_t i = 0; i < heads_.width; ++i) x[i] *= factor;
    }

    bool write(const Pair& pair, int64_t query) {
        const int64_t width = heads_.width, row = pair.first + query, place = row * heads_.count + pair.head;
        const bool blind = Block(pair, query, 0).seen(0) == 0;
        const float sum = sum_of_lanes(lanes_at(sums_.get() + query * kLanes));
        float* x = context_.get() + query * stride_;
        scale_context(query, blind ? 0.0f : given_.v.scale() * this->keep() / sum);
        if (op_.log_sum) op_.log_sum[place] = blind ? -infinity() : largest_[query] + std::log(sum);
        if (rows_) std::memcpy(rows_ + place * width, x, width * sizeof(float));
        if (!op_.rounded.codes || width % 8) return false;
        return round_row(op_.rounded, place * width, width, x, flags_.data());
    }

    const Attention& op_;
    float* rows_;  // where the context goes as floats, if anywhere
    AlignedFloats context_, sums_;        // so far, times exp(largest score); sums: in so many lanes
    std::vector<float> largest_;  // scores so far
    std::vector<uint8_t> flags_;
    typename Products::template Left<false> probabilities_;
    typename Products::template Right<false> values_;
};

// Rounds n numbers, whichever rows they make.
bool round_all(const Coded& coded, int64_t n, const float* x) {
    constexpr int64_t kChunk = 1024;
    return for_rows((n + kChunk - 1) / kChunk, kChunk, [&](int64_t chunk, Scratch& scratch) {
        const int64_t first = chunk * kChunk, count = std::min(kChunk, n - first);
        return static_cast<int>(round_row(coded, first, count, x + first, scratch.flags.data()));
    });
}

// -> whether a value that was rounded was NaN
template <class Products>
bool attend(const Attention& op, float* rows) {
    const Case given(op.heads);
    int missing = 0;
#pragma omp parallel reduction(| : missing)
    {
        ForwardWorker<Products> worker(op, given, rows);
#pragma omp for schedule(dynamic)
        for (size_t i = 0; i < given.order.size(); ++i) missing |= worker.run(Pair(op.heads, given.order[i]));
    }
    return missing;
}

}  // namespace

LSQ_OPERATION(Attention, op) {
    const int64_t width = op.heads.width, size = op.heads.rows * op.heads.count * width;
    const bool afterwards = op.rounded.codes && width % 8;  // heads do not begin at bytes of the clipped bits
    std::vector<float> waiting(afterwards && !op.out ? size : 0);
    float* rows = afterwards && !op.out ? waiting.data() : op.out;
    bool missing = false;
    with_products([&](auto products) { missing = attend<decltype(products)>(op, rows); });
    if (afterwards) missing |= round_all(op.rounded, size, rows);
    finish(op.rounded, missing);
}
