// Best words of each row, best first, and log-probabilities, from the results of
// next_words_product.cu; a block takes a row.
//
// lsq/ops/next_words.py is the reference. The best words are among the best groups of eight, whose
// logits are computed again, as are those of the wanted words.
#include "reduce.cuh"
#include "vocabulary_loss.cuh"

namespace {

// Codes that a lane reads at a time.
constexpr int kThreads = 256, kWarps = kThreads / kWarp, kCodes = 16;

// A logit, not NaN, of a word or a group of words.
struct Candidate {
    float logit;
    int32_t number;

    LSQ_INLINE bool before(const Candidate& other) const {
        return logit > other.logit || (logit == other.logit && number < other.number);
    }
    LSQ_INLINE void join(const Candidate& other) {
        if (other.before(*this)) *this = other;
    }
};

// The thread's best group after `last`.
LSQ_INLINE Candidate next_of_thread(const float* largest, int64_t count, const Candidate& last) {
    Candidate best{-infinity(), 0x7FFFFFFF};
#pragma unroll 8
    for (int64_t i = threadIdx.x; i < count; i += kThreads) {
        const Candidate group{largest[i], static_cast<int32_t>(i)};
        if (last.before(group)) best.join(group);
    }
    return best;
}

// chosen [wanted]: the best of `count` groups, the first of equal ones. All threads must call this.
LSQ_INLINE void choose_groups(const float* largest, int64_t count, int64_t wanted,
                              int32_t* chosen) {
    __shared__ Candidate of_warps[2][kWarps];  // in turn, so that one barrier a turn is enough
    Candidate own = next_of_thread(largest, count, {infinity(), -1});
#pragma unroll 1
    for (int64_t j = 0; j < wanted; ++j) {
        Candidate best = own;
#pragma unroll
        for (int distance = kWarp / 2; distance; distance /= 2) {
            best.join({__shfl_xor_sync(kAllLanes, best.logit, distance),
                       __shfl_xor_sync(kAllLanes, best.number, distance)});
        }
        if (threadIdx.x % kWarp == 0) of_warps[j % 2][threadIdx.x / kWarp] = best;
        __syncthreads();
#pragma unroll
        for (int warp = 0; warp < kWarps; ++warp) best.join(of_warps[j % 2][warp]);
        if (threadIdx.x == 0) chosen[j] = best.number;
        if (own.number == best.number) own = next_of_thread(largest, count, best);
    }
}

// Calls use(rank, word, logit) for the `wanted` best words of groups [count] with logits [count,
// 8]; each thread counts the words before its own.
template <class Use>
LSQ_INLINE void rank_words(const int32_t* groups, const float* logits, int64_t count,
                           int64_t wanted, const Use& use) {
#pragma unroll 1
    for (int64_t i = threadIdx.x; i < count * kVector; i += kThreads) {
        const Candidate own{logits[i],
                            groups[i / kVector] * kVector + static_cast<int32_t>(i % kVector)};
        int32_t rank = 0;
#pragma unroll 1
        for (int64_t j = 0; j < count; ++j) {
            const int32_t first = groups[j] * kVector;
            float other[kVector];
            load8(logits + j * kVector, other);
#pragma unroll
            for (int k = 0; k < kVector; ++k) rank += Candidate{other[k], first + k}.before(own);
        }
        if (rank < wanted) use(rank, own.number, own.logit);
    }
}

// sums[i] = x [inner] times row i of `weight` [WORDS, inner], by one warp, for all of its lanes.
template <int WORDS>
LSQ_INLINE void multiply_words(const int8_t* x, const int8_t* weight, int64_t inner,
                               int32_t (&sums)[WORDS]) {
#pragma unroll 1
    for (int64_t column = kCodes * (threadIdx.x % kWarp); column < inner;
         column += kCodes * kWarp) {
        const int4 a = load_words<int4>(x + column);
#pragma unroll
        for (int i = 0; i < WORDS; ++i) {
            const int4 b = load_words<int4>(weight + i * inner + column);
            sums[i] =
                __dp4a(a.w, b.w, __dp4a(a.z, b.z, __dp4a(a.y, b.y, __dp4a(a.x, b.x, sums[i]))));
        }
    }
#pragma unroll
    for (int i = 0; i < WORDS; ++i) sums[i] = warp_reduce<Sum>(sums[i]);
}

// Log of the sum of exponentials of a row's logits, for all threads. parts [count, 2]: see
// next_words_product.cu.
LSQ_INLINE float normaliser_of(const float2* parts, int64_t count) {
    float largest = -infinity(), sum = 0.0f;
#pragma unroll 4
    for (int64_t i = threadIdx.x; i < count; i += kThreads)
        largest = Maximum::join(load_words<float2>(parts + i).x, largest);
    largest = group_reduce<Maximum, kThreads, kThreads>(largest);
    const float shift = shift_of(largest);
#pragma unroll 4
    for (int64_t i = threadIdx.x; i < count; i += kThreads) {
        const float2 part = load_words<float2>(parts + i);
        sum += part.y * bounded_exponential(part.x - shift);
    }
    return largest + logf(group_reduce<Sum, kThreads, kThreads>(sum));
}

}  // namespace

// groups [R, groups_stride] and parts [R, parts_count, 2]: see next_words_product.cu. Writes chosen
// [R, chosen_count], the best groups, and logits [R, chosen_count, 8] of their words.
LSQ_KERNEL __launch_bounds__(kThreads, 3)
    lsq_next_words(const NextWords op, int64_t inner, In<float> groups, int64_t groups_stride,
                   In<float> parts, int64_t parts_count, Out<int32_t> chosen, int64_t chosen_count,
                   Out<float> logits) {
    wait_for_launches();
    const int64_t row = blockIdx.x, vocabulary = op.vocabulary;
    const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
    const int8_t* x = op.x.codes + row * inner;
    const float x_scale = op.x.scale[0];
    const float normaliser =
        normaliser_of(reinterpret_cast<const float2*>(parts + 2 * row * parts_count), parts_count);
    if (op.words) {
        int32_t* own_groups = chosen + row * chosen_count;
        float* own_logits = logits + row * chosen_count * kVector;
        choose_groups(groups + row * groups_stride, (vocabulary + kVector - 1) / kVector,
                      chosen_count, own_groups);
        __syncthreads();
#pragma unroll 1
        for (int64_t j = warp; j < chosen_count; j += kWarps) {
            const int64_t first = static_cast<int64_t>(own_groups[j]) * kVector;
            int32_t sums[kVector] = {};
            multiply_words(x, op.weight.codes + first * inner, inner, sums);
            int32_t sum = 0;
#pragma unroll
            for (int i = 0; i < kVector; ++i) sum = lane == i ? sums[i] : sum;
            if (lane >= kVector) continue;
            const float logit = static_cast<float>(sum) * (x_scale * op.weight.scale[first + lane]);
            const bool counts = first + lane < vocabulary && logit == logit;
            own_logits[j * kVector + lane] = counts ? logit : -infinity();
        }
        __syncthreads();
        rank_words(own_groups, own_logits, chosen_count, op.best,
                   [&](int32_t rank, int32_t word, float logit) {
                       op.words[row * op.best + rank] = word;
                       op.scores[row * op.best + rank] = logit - normaliser;
                   });
    }
#pragma unroll 1
    for (int64_t j = row * op.asked + warp; j < (row + 1) * op.asked; j += kWarps) {
        const int64_t word = op.wanted[j];
        const bool known = word >= 0 && word < vocabulary;
        int32_t sum[1] = {};
        if (known) multiply_words(x, op.weight.codes + word * inner, inner, sum);
        if (lane == 0) {
            const float logit = known
                                    ? static_cast<float>(sum[0]) * (x_scale * op.weight.scale[word])
                                    : not_a_number();
            op.wanted_scores[j] = logit - normaliser;
        }
    }
    if (!op.every) return;
#pragma unroll 4
    for (int64_t v = threadIdx.x; v < vocabulary; v += kThreads)
        op.every[row * vocabulary + v] -= normaliser;
}
LSQ_EXPORT(lsq_next_words)
