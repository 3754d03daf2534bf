// Label-smoothed cross-entropy and its gradient as epilogues of the product that makes the logits;
// see lsq/ops/vocabulary_loss.py. Logits are int32 sums if the operation has codes, else floats.
#include "column_blocks.h"
#include "lanes.h"
#include "loops.h"

using namespace lsq;

namespace {

// Sum of a row's target weights.
float factor_of(const Prediction& given) {
    return given.target_weight + given.each * static_cast<float>(given.vocabulary);
}

// A thread's factors of a block of columns, and a row of them, in whole Lanes.
class Columns {
public:
    explicit Columns(const Prediction& given)
        : given_(given), alpha_(memory_.at_least(3 * given.block_columns)),
          scale_(alpha_ + given.block_columns), row_(scale_ + given.block_columns) {
        std::fill(alpha_, row_, 1.0f);
    }

    // Takes the columns from `begin` on. -> how many of `count` are words
    int64_t take(int64_t begin, int64_t count) {
        const int64_t words = std::clamp<int64_t>(given_.vocabulary - begin, 0, count);
        if (!given_.x.coded.codes) return words;
        const float input = given_.x.coded.scale[0], *scale = given_.weight.scale + begin;
        for (int64_t v = 0; v < words; ++v) {
            alpha_[v] = input * scale[v];
            scale_[v] = scale[v];
        }
        return words;
    }

    const float* alpha() const { return alpha_; }  // of sums; 1 for float logits
    float* scale() const { return scale_; }        // of the weight; 1 for float logits
    float* row() const { return row_; }

private:
    const Prediction& given_;
    Kept<float> memory_;
    float *alpha_, *scale_, *row_;
};

// Per block of columns and row, [blocks, M] each: the largest logit; the sum of exp(logit -
// largest); without the target, the two largest multiples of that by the weight's scale, and the
// word of the first; the sum of logits.
struct Parts {
    int64_t blocks, rows;
    float *largest, *sum, *scaled, *second, *total;
    int32_t* word;

    Parts(const Prediction& given, float* memory)
        : blocks((given.columns + given.block_columns - 1) / given.block_columns), rows(given.rows),
          largest(memory), sum(largest + blocks * rows), scaled(sum + blocks * rows),
          second(scaled + blocks * rows), total(second + blocks * rows),
          word(reinterpret_cast<int32_t*>(total + blocks * rows)) {}
};

// Nothing above minus infinity: any finite shift gives exp = 0.
float shift_of(float largest) { return largest == -infinity() ? 0.0f : largest; }

// Adds up blocks of logits on one thread; `chosen` [M]: the logits of the targets.
class Adder {
public:
    Adder(const VocabularyLoss& op, float* memory, float* chosen)
        : given_(op.prediction), parts_(given_, memory), chosen_(chosen), columns_(given_) {}

    template <class T>
    void operator()(const SumsBlock<T>& block) {
        const int64_t words = columns_.take(block.column, block.columns);
        const int64_t first = block.column / given_.block_columns * parts_.rows;
        for (int64_t row = block.row; row < block.row + block.rows; ++row) {
            const T* sums = block.sums + (row - block.row) * block.stride;
            const float* alpha = columns_.alpha();
            float largest = -infinity(), total = 0.0f, *x = columns_.row();
#pragma omp simd reduction(max : largest) reduction(+ : total)
            for (int64_t v = 0; v < words; ++v) {
                x[v] = static_cast<float>(sums[v]) * alpha[v];
                largest = x[v] > largest ? x[v] : largest;
                total += x[v];
            }
            std::fill(x + words, x + rounded_up(words, kLanes), -infinity());
            parts_.largest[first + row] = largest;
            parts_.total[first + row] = total;
            exponentials(row, block.column, words, shift_of(largest), first + row);
        }
    }

private:
    void exponentials(int64_t row, int64_t column, int64_t words, float shift, int64_t part) {
        const int64_t word = given_.target[row] - column;
        float target = 0.0f, *x = columns_.row(), *scale = columns_.scale();
        if (word >= 0 && word < words && given_.target[row] != given_.padding) {
            chosen_[row] = x[word];
            target = lsq::bounded_exponential(x[word] - shift);
            x[word] = -infinity();
        }
        // No NaN in the last two: then there is one in `sum`.
        Lanes sum = {}, scaled = {}, second = {};
        for (int64_t v = 0; v < words; v += kLanes) {
            const Lanes exponential = bounded_exponential(lanes_at(x + v) - shift);
            sum += exponential;
            const Lanes multiple = exponential * lanes_at(scale + v);
            second = larger_lanes(multiple < scaled ? multiple : scaled, second);
            scaled = larger_lanes(multiple, scaled);
            lanes_at(x + v) = multiple;
        }
        const float most = largest_lane(scaled);
        const int64_t found = first_equal(x, words, most);
        if (found < words) scaled[found % kLanes] = second[found % kLanes];
        parts_.sum[part] = sum_of_lanes(sum) + target;
        parts_.scaled[part] = most;
        parts_.second[part] = largest_lane(scaled);
        parts_.word[part] = static_cast<int32_t>(column + (found < words ? found : 0));
    }

    const Prediction& given_;
    Parts parts_;
    float* chosen_;
    Columns columns_;
};

constexpr int64_t kRows = 16;  // that are joined together

struct Joined {
    float largest[kRows], sum[kRows] = {}, scaled[kRows] = {}, second[kRows] = {},
                          total[kRows] = {};
    int32_t word[kRows] = {};

    // Joins the blocks of `count` rows from `first` on, in order.
    Joined(const Parts& parts, int64_t first, int64_t count) {
        std::fill(largest, largest + kRows, -infinity());
        for (int64_t block = 0; block < parts.blocks; ++block) {
            const float* from = parts.largest + block * parts.rows + first;
#pragma omp simd
            for (int64_t i = 0; i < count; ++i)
                largest[i] = from[i] > largest[i] ? from[i] : largest[i];
        }
        for (int64_t block = 0; block < parts.blocks; ++block) {
            const int64_t at = block * parts.rows + first;
#pragma omp simd
            for (int64_t i = 0; i < count; ++i) {
                const float factor = bounded_exponential(parts.largest[at + i] - largest[i]);
                const float most = parts.scaled[at + i] * factor,
                            next = parts.second[at + i] * factor;
                const float before = scaled[i], behind = second[i];
                const int32_t its = parts.word[at + i], mine = word[i];
                const float smaller = most > before ? before : most,
                            other = most > before ? next : behind;
                sum[i] += parts.sum[at + i] * factor;
                total[i] += parts.total[at + i];
                second[i] = smaller > other ? smaller : other;
                scaled[i] = most > before ? most : before;
                word[i] = most > before ? its : mine;
            }
        }
    }
};

// The gradient of blocks of logits on one thread.
class Differentiator {
public:
    explicit Differentiator(const VocabularyLossGradient& op)
        : op_(op), given_(op.prediction), columns_(given_) {}

    template <class T>
    void operator()(const SumsBlock<T>& block) {
        const int64_t words = columns_.take(block.column, block.columns);
        for (int64_t i = 0; i < block.rows; ++i) {
            const int64_t row = block.row + i, first = row * given_.columns + block.column;
            const bool counted = given_.target[row] != given_.padding;
            if (counted) gradient(row, block.sums + i * block.stride, block.column, words);
            float* x = columns_.row();
            std::fill(x + (counted ? words : 0), x + block.columns, 0.0f);
            if (op_.rounded.codes) {
                round(row, block.column, words, block.columns);
            } else {
                std::memcpy(op_.dlogits + first, x, block.columns * sizeof(float));
            }
        }
    }

private:
    template <class T>
    void gradient(int64_t row, const T* sums, int64_t column, int64_t words) const {
        const float *alpha = columns_.alpha(), factor = factor_of(given_), each = given_.each;
        const float shift = op_.normaliser[row], upstream = op_.dlogits ? op_.dloss[0] : 1.0f;
        float* x = columns_.row();
#pragma omp simd
        for (int64_t v = 0; v < words; ++v) x[v] = static_cast<float>(sums[v]) * alpha[v] - shift;
        std::fill(x + words, x + rounded_up(words, kLanes), 0.0f);
        for (int64_t v = 0; v < words; v += kLanes) {
            lanes_at(x + v) = (bounded_exponential(lanes_at(x + v)) * factor - each) * upstream;
        }
        const int64_t word = given_.target[row] - column;
        if (word >= 0 && word < words) x[word] -= given_.target_weight * upstream;
    }

    // Rounds columns from `column` on at random. The first columns write the scale.
    void round(int64_t row, int64_t column, int64_t words, int64_t columns) {
        const RoundedGradient& rounded = op_.rounded;
        const GradientScale s = gradient_scale(op_.bound[row], rounded.largest);
        if (column == 0) rounded.scale[row] = s.scale * op_.dloss[0];
        int8_t* codes = rounded.codes + row * given_.columns + column;
        const int64_t wanted = s.reciprocal == 0.0f ? 0 : words;  // vanishing, or not finite
        std::memset(codes + wanted, 0, columns - wanted);
        if (wanted == 0) return;
        float* x = columns_.row();
        const float* scale = columns_.scale();
#pragma omp simd
        for (int64_t v = 0; v < wanted; ++v) x[v] *= scale[v];
        const uint32_t word = philox_word(rounded.key[0], rounded.subsequence, row);
        round_at_random(x, wanted, s.reciprocal, word + static_cast<uint32_t>(column) * kWordStep,
                        rounded.largest, codes);
        if (!op_.kept.likeliest) return;
        for (const int64_t kept : {given_.target[row] - column, op_.kept.likeliest[row] - column}) {
            if (kept >= 0 && kept < words) codes[kept] = 0;
        }
    }

    const VocabularyLossGradient& op_;
    const Prediction& given_;
    Columns columns_;
};

}  // namespace

LSQ_EXPORT void lsq_multiply_vocabulary_loss(const VocabularyLoss& op, const TileProduct& product,
                                             float* parts, float* chosen) {
    multiply_columns(product, op.prediction.block_columns,
                     [&] { return Adder(op, parts, chosen); });
}

// Rows [first, first + rows) of float logits [rows, P].
LSQ_EXPORT void lsq_end_vocabulary_loss(const VocabularyLoss& op, const float* logits,
                                        int64_t first, int64_t rows, float* parts, float* chosen) {
    read_columns(logits, first, rows, op.prediction, [&] { return Adder(op, parts, chosen); });
}

// Joins the blocks of columns: normalisers, bounds, and both losses.
LSQ_EXPORT void lsq_finish_vocabulary_loss(const VocabularyLoss& op, float* memory,
                                           const float* chosen) {
    const Prediction& given = op.prediction;
    const Parts parts(given, memory);
    const float factor = factor_of(given), each = given.each, target_weight = given.target_weight;
    const float* scale = given.weight.scale;
    const float most =
        op.bound
            ? float_of(magnitude_of(*std::max_element(
                  scale, scale + given.vocabulary,
                  [](float one, float other) { return magnitude_of(one) < magnitude_of(other); })))
            : 0.0f;
    const int64_t groups = (given.rows + kRows - 1) / kRows;
    std::vector<double> losses(groups), nlls(groups);
#pragma omp parallel for schedule(static)
    for (int64_t group = 0; group < groups; ++group) {
        const int64_t first = group * kRows, count = std::min(kRows, given.rows - first);
        const Joined joined(parts, first, count);
        for (int64_t i = 0; i < count; ++i) {
            const int64_t row = first + i, word = given.target[row];
            const bool counted = word != given.padding;
            const float normaliser = joined.largest[i] + std::log(joined.sum[i]);
            const float nll = counted ? normaliser - chosen[row] : 0.0f;
            const float smooth =
                static_cast<float>(given.vocabulary) * normaliser - joined.total[i];
            nlls[group] += nll;
            losses[group] += counted ? target_weight * nll + each * smooth : 0.0f;
            if (op.normaliser) op.normaliser[row] = normaliser;
            if (!op.bound) continue;
            const int64_t likeliest = counted ? joined.word[i] : 0;
            float bound = 0.0f, own = 0.0f, other = 0.0f;
            if (counted) {
                const float share = factor / joined.sum[i];
                own = bounded_exponential(chosen[row] - normaliser) * factor - each - target_weight;
                if (likeliest != word) other = joined.scaled[i] * share / scale[likeliest] - each;
                const float multiple = op.kept.gradient ? joined.second[i] : joined.scaled[i];
                Magnitude largest =
                    std::max(magnitude_of(multiple * share), magnitude_of(each * most));
                if (!op.kept.gradient) largest = std::max(largest, magnitude_of(own * scale[word]));
                bound = float_of(largest);
            }
            op.bound[row] = bound;
            if (!op.kept.gradient) continue;
            op.kept.likeliest[row] = likeliest;
            op.kept.gradient[row] = own;
            op.kept.gradient[given.rows + row] = other;
        }
    }
    write_sum(losses, 1.0f, op.loss);
    write_sum(nlls, 1.0f, op.nll);
}

LSQ_EXPORT void lsq_multiply_vocabulary_loss_gradient(const VocabularyLossGradient& op,
                                                      const TileProduct& product) {
    multiply_columns(product, op.prediction.block_columns, [&] { return Differentiator(op); });
}

LSQ_EXPORT void lsq_end_vocabulary_loss_gradient(const VocabularyLossGradient& op,
                                                 const float* logits, int64_t first, int64_t rows) {
    read_columns(logits, first, rows, op.prediction, [&] { return Differentiator(op); });
}
