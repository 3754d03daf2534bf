// Projection onto a vocabulary that keeps the best words of each row; lsq/ops/next_words.py is the
// reference.
//
// Threads share blocks of words; partial results are joined in order.
#include <omp.h>

#include "aligned.h"
#include "lanes.h"
#include "packed.h"

using namespace lsq;

namespace {

constexpr int64_t kBlock = 256;  // words that a thread takes at a time
constexpr int64_t kStrip = 32;   // rows

struct Candidate {
    float logit;
    int64_t word;

    bool before(const Candidate& other) const {
        return logit > other.logit || (logit == other.logit && word < other.word);
    }
};

// Whether a lane is >= least.
bool any_at_least(Lanes x, float least) {
#if defined(__AVX512F__)
    return _mm512_cmp_ps_mask(x, _mm512_set1_ps(least), _CMP_GE_OQ) != 0;
#else
    return largest_lane(x) >= least;
#endif
}

// Partial results of all threads.
struct Shared {
    int64_t rows, best, blocks, threads;
    std::vector<float> largest, sum;    // [R, blocks] of exp(logit - largest)
    std::vector<Candidate> candidates;  // [threads, R, K], best first

    explicit Shared(const NextWords& op)
        : rows(op.rows), best(op.best), blocks((op.vocabulary + kBlock - 1) / kBlock),
          threads(omp_get_max_threads()), largest(rows * blocks), sum(rows * blocks),
          candidates(threads * rows * best, Candidate{-infinity(), 0}) {}

    Candidate* of(int64_t thread, int64_t row) {
        return candidates.data() + (thread * rows + row) * best;
    }

    float normaliser(int64_t row) const {
        const float *most = largest.data() + row * blocks, *sums = sum.data() + row * blocks;
        const float top = *std::max_element(most, most + blocks);
        float total = 0.0f;
        for (int64_t block = 0; block < blocks; ++block)
            total += sums[block] * std::exp(most[block] - top);
        return top + std::log(total);
    }
};

class Block {
public:
    Block(const NextWords& op, Shared& shared, int64_t thread)
        : op_(op), shared_(shared), thread_(thread), alpha_(kBlock), logits_(kBlock) {}

    // Takes words [begin, begin + words) of rows [first, first + rows).
    void operator()(int64_t begin, int64_t words, int64_t first, int64_t rows, const int32_t* sums,
                    int64_t stride) {
        const float input = op_.x.scale[0], *scale = op_.packed_weight.scale + begin;
        float *alpha = alpha_.data(), *y = logits_.data();
        for (int64_t i = 0; i < words; ++i) alpha[i] = input * scale[i];
        for (int64_t row = first; row < first + rows; ++row, sums += stride) {
            const float most = add_up(row, begin / kBlock, words, sums);
            if (op_.best) choose(row, begin, words, most);
            for (int64_t j = 0; j < op_.asked; ++j) {
                const int64_t word = op_.wanted[row * op_.asked + j] - begin;
                if (word >= 0 && word < words) op_.wanted_scores[row * op_.asked + j] = y[word];
            }
            if (op_.every) std::copy_n(y, words, op_.every + row * op_.vocabulary + begin);
        }
    }

private:
    // Makes the logits, -infinity behind the last one. -> the largest
    float add_up(int64_t row, int64_t block, int64_t words, const int32_t* sums) {
        const int64_t whole = rounded_up(words, kLanes);
        float* y = logits_.data();
        for (int64_t i = words; i < whole; ++i) y[i] = -infinity();
#pragma omp simd
        for (int64_t i = 0; i < words; ++i) y[i] = static_cast<float>(sums[i]) * alpha_[i];
        Lanes most = all_lanes(-infinity()), sum = {};
        for (int64_t i = 0; i < whole; i += kLanes) most = larger_lanes(lanes_at(y + i), most);
        const float largest = largest_lane(most);
        const Lanes base = all_lanes(largest == -infinity() ? 0.0f : largest);
        for (int64_t i = 0; i < whole; i += kLanes)
            sum += bounded_exponential(lanes_at(y + i) - base);
        shared_.largest[row * shared_.blocks + block] = largest;
        shared_.sum[row * shared_.blocks + block] = sum_of_lanes(sum);
        return largest;
    }

    // Inserts words that are better than the worst kept one.
    void choose(int64_t row, int64_t begin, int64_t words, float most) {
        Candidate* kept = shared_.of(thread_, row);
        Candidate& last = kept[op_.best - 1];
        if (most < last.logit) return;
        const float* y = logits_.data();
        for (int64_t first = 0; first < words; first += kLanes) {
            const int64_t past = std::min(first + kLanes, words);
            if (!any_at_least(lanes_at(y + first), last.logit)) continue;
            for (int64_t i = first; i < past; ++i) {
                const Candidate word{y[i], begin + i};
                if (!word.before(last)) continue;
                int64_t rank = op_.best - 1;
                for (; rank > 0 && word.before(kept[rank - 1]); --rank) kept[rank] = kept[rank - 1];
                kept[rank] = word;
            }
        }
    }

    const NextWords& op_;
    Shared& shared_;
    int64_t thread_;
    Aligned<float> alpha_, logits_;
};

// Turns the logits of row `row` into log-probabilities.
void finish_row(const NextWords& op, Shared& shared, int64_t row, std::vector<int64_t>& heads) {
    const float normaliser = shared.normaliser(row);
    std::fill(heads.begin(), heads.end(), 0);
    for (int64_t j = 0; j < op.best; ++j) {
        int64_t from = 0;
        for (int64_t thread = 1; thread < shared.threads; ++thread) {
            if (shared.of(thread, row)[heads[thread]].before(shared.of(from, row)[heads[from]]))
                from = thread;
        }
        const Candidate& next = shared.of(from, row)[heads[from]++];
        op.words[row * op.best + j] = next.word;
        op.scores[row * op.best + j] = next.logit - normaliser;
    }
    for (int64_t j = 0; j < op.asked; ++j) op.wanted_scores[row * op.asked + j] -= normaliser;
    if (!op.every) return;
    float* all = op.every + row * op.vocabulary;
#pragma omp simd
    for (int64_t i = 0; i < op.vocabulary; ++i) all[i] -= normaliser;
}

}  // namespace

LSQ_OPERATION(NextWords, op) {
    const TileProduct product = packed_product(op.x, op.packed_weight, op.rows);
    Shared shared(op);
#pragma omp parallel
    {
        static thread_local Kept<int32_t> kept;
        constexpr int64_t kStride = kBlock + kTileSide;
        Block read(op, shared, omp_get_thread_num());
        with_multiplier(product, op.packed_weight, [&](auto& multiplier) {
            int64_t taken = -1;
#pragma omp for schedule(dynamic)
            for (int64_t block = 0; block < shared.blocks; ++block) {
                const int64_t begin = block * kBlock,
                              words = std::min(kBlock, op.vocabulary - begin);
                for (int64_t first = 0; first < op.rows; first += kStrip) {
                    const int64_t rows = std::min(kStrip, op.rows - first);
                    if (taken != first) multiplier.take(taken = first, rows);
                    int32_t* sums = kept.at_least(multiplier.height() * kStride);
                    multiplier.multiply(begin, begin + rounded_up(words, kTilePair), sums, kStride);
                    read(begin, words, first, rows, sums, kStride);
                }
            }
        });
        std::vector<int64_t> heads(shared.threads);
#pragma omp for schedule(static)
        for (int64_t row = 0; row < op.rows; ++row) finish_row(op, shared, row, heads);
    }
}
