// Attention over packed sequences (FlashAttention-2, Dao 2023); lsq/ops/attention.py is the
// reference.
#include "attention_codes.h"

using namespace lsq;

namespace {

constexpr int64_t kFew = 4 * kUnit;  // keys whose probabilities stay in the first cache

// Multiplies floats.
template <class Products>
class ForwardWorker : Worker<Products> {
    using Base = Worker<Products>;
    using Base::given_, Base::heads_, Base::stride_, Base::scores_;

public:
    ForwardWorker(const Attention& op, const Case& given, float* rows)
        : Base(given), contexts_(op, given, rows, 1.0f), largest_(given.queries),
          probabilities_(kQueryBlock, kFew, false), values_(stride_, given.keys, given.v.coded()) {}

    // -> the largest magnitude of what was rounded
    Magnitude run(const Pair& pair) {
        std::fill_n(largest_.begin(), pair.queries, -infinity());
        contexts_.start(pair);
        const auto begin = [&](const Block& block) {
            this->read_keys(block);
            this->keys(given_.v, block, [&](auto v) { values_.take(v, heads_.width, v.rows); });
        };
        this->for_blocks(pair, begin, [&](const Block& block) { add(block); }, [](const Block&) {});
        Magnitude most = 0;
        for (int64_t query = 0; query < pair.queries; ++query) {
            most = std::max(most, contexts_.write(pair, query, largest_[query]));
        }
        return most;
    }

private:
    // Adds the block's keys to the context.
    void add(const Block& block) {
        this->multiply_keys(block);
        for (int64_t i = 0; i < block.queries; ++i) {
            this->add_bias(block, i, scores_.get() + i * given_.wide);
            this->hide(block, i, scores_.get() + i * given_.wide, -infinity());
            find_largest(block, i);
        }
        for (int64_t first = 0; first == 0 || first < block.keys; first += kFew) {
            const int64_t keys = std::min(kFew, block.keys - first);
            probabilities_.start(keys);
            for (int64_t i = 0; i < block.queries; ++i) softmax(block, i, first, keys);
            Products::multiply(probabilities_, values_, block.queries, heads_.width, keys,
                               !block.opens() || first, contexts_.row(block.query), stride_, first);
        }
    }

    // Updates the largest score of query `i` of the block; a new one shrinks the context so far.
    void find_largest(const Block& block, int64_t i) {
        const float* x = scores_.get() + i * given_.wide;
        const int64_t query = block.query + i;
        const float before = largest_[query];
        Lanes most = all_lanes(-infinity());
        for_lanes(block.seen(i), [&](int64_t j, auto seen) {
            most = larger_lanes(seen(lanes_at(x + j), -infinity()), most);
        });
        const float here = largest_lane(most) * given_.left_factor(),
                    largest = here > before ? here : before;
        if (!block.opens() && largest != before)
            contexts_.shrink(query, bounded_exponential(before - largest));
        largest_[query] = largest;
    }

    // Products of query `i` and `keys` keys from `first` on -> exp(score - largest) after dropout,
    // 0 for hidden keys.
    void softmax(const Block& block, int64_t i, int64_t first, int64_t keys) {
        const float* x = scores_.get() + i * given_.wide + first;
        const int64_t n = std::clamp<int64_t>(block.seen(i) - first, 0, keys),
                      query = block.query + i;
        this->draw(block, i, first, n);
        // A query may have seen no key of its window yet.
        const float least = std::numeric_limits<float>::lowest();
        const float largest =
            block.pair.window ? std::max(largest_[query], least) : largest_[query];
        const Lanes factor = all_lanes(given_.left_factor()), base = all_lanes(largest);
        Lanes& to = contexts_.sum(query);
        Lanes sum = to;
        const auto kept = this->kept();
        const auto row = probabilities_.row(i);
        const auto vector_at = [&](int64_t j) {
            if (j >= n) return Lanes{};
            const Lanes all = bounded_exponential(lanes_at(x + j) * factor - base);
            const Lanes p = j + kLanes <= n ? all : first_lanes(all, n - j, 0.0f);
            sum += p;
            return kept(j, p);
        };
        for (int64_t j = 0; j < whole_units(keys); j += 2 * kLanes) {
            const Lanes low = vector_at(j);
            row.put(j, low, vector_at(j + kLanes));
        }
        to = sum;
    }

    Contexts contexts_;
    std::vector<float> largest_;  // scores so far
    typename Products::template Left<false> probabilities_;
    typename Products::template Right<false> values_;
};

// Rounds n numbers, across rows.
Magnitude round_all(const Coded& coded, int64_t n, const float* x) {
    constexpr int64_t kChunk = 1024;
    return for_rows((n + kChunk - 1) / kChunk, kChunk, [&](int64_t chunk, Scratch& scratch) {
        const int64_t first = chunk * kChunk, count = std::min(kChunk, n - first);
        return round_row(coded, first, count, x + first, scratch.flags.data());
    });
}

// -> the largest magnitude of what was rounded
template <class Forward>
Magnitude attend(const Attention& op, const Case& given, float* rows) {
    Magnitude largest = 0;
#pragma omp parallel reduction(max : largest)
    {
        Forward worker(op, given, rows);
#pragma omp for schedule(dynamic)
        for (size_t i = 0; i < given.order.size(); ++i) {
            largest = std::max(largest, worker.run(given.pair(given.order[i])));
        }
    }
    return largest;
}

Magnitude attend(const Attention& op, float* rows) {
    const Case given(op.heads);
#ifdef LSQ_BYTES
    if (given.coded() && given.biases.empty()) {
        if (allowed(Instructions::amx)) return attend<CodedForward<AmxBytes>>(op, given, rows);
        if (allowed(Instructions::avx512_vnni))
            return attend<CodedForward<VnniBytes>>(op, given, rows);
    }
#endif
    Magnitude largest = 0;
    with_products([&](auto products) {
        largest = attend<ForwardWorker<decltype(products)>>(op, given, rows);
    });
    return largest;
}

}  // namespace

LSQ_OPERATION(Attention, op) {
    const int64_t width = op.heads.width, size = op.heads.rows * op.heads.count * width;
    // If heads do not begin at whole bytes of the clipped bits, rounding waits for whole rows.
    const bool afterwards = op.rounded.codes && width % 8;
    std::vector<float> waiting(afterwards && !op.out ? size : 0);
    float* rows = afterwards && !op.out ? waiting.data() : op.out;
    Magnitude largest = attend(op, rows);
    if (afterwards) largest = std::max(largest, round_all(op.rounded, size, rows));
    finish(op.rounded, largest);
}

// Limits attention to these instructions (numbers of tiles.h) and slower ones, until the next call.
LSQ_EXPORT void lsq_limit_attention(int64_t instructions) {
    fastest_allowed = static_cast<Instructions>(instructions);
}
