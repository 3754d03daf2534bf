// The best words of each row, best first, and log-probabilities, from what next_words_product.cu leaves: a block takes a row.
//
// lsq/ops/next_words.py is the reference. The best words are among the best groups of eight, whose logits are made again by
// dot products; so are those of the wanted words.
#include "reduce.cuh"
#include "vocabulary_loss.cuh"

namespace {

constexpr int kThreads = 256, kWarps = kThreads / kWarp, kCodes = 16;  // codes that a lane reads at a time

// A logit and which word, or group of words, it belongs to.
struct Candidate {
    float logit;
    int32_t number;

    __device__ __forceinline__ static Candidate none() { return {-infinity(), 0x7FFFFFFF}; }
    __device__ __forceinline__ bool before(const Candidate& other) const {
        return logit > other.logit || (logit == other.logit && number < other.number);
    }
    __device__ __forceinline__ void join(const Candidate& other) {
        if (other.before(*this)) *this = other;
    }
};

// The best of `count` that come after `last`, of those that belong to this thread. NaN does not come after anything.
template <class At>
__device__ __forceinline__ Candidate next_of_thread(int64_t count, const At& at, const Candidate& last) {
    Candidate best = Candidate::none();
#pragma unroll 4
    for (int64_t i = threadIdx.x; i < count; i += kThreads) {
        const Candidate found = at(i);
        if (last.before(found)) best.join(found);
    }
    return best;
}

// Calls use(j, candidate) on one thread for the `wanted` best of `count` candidates, best first, none where there are no
// more. at(i) is the i-th; their numbers differ. All threads must call this.
template <class At, class Use>
__device__ __forceinline__ void take_best(int64_t count, int64_t wanted, const At& at, const Use& use) {
    __shared__ Candidate of_warps[2][kWarps];  // in turn, so that one barrier a turn is enough
    Candidate own = next_of_thread(count, at, {infinity(), -1});
    __syncthreads();  // a call before has read what it left
#pragma unroll 1
    for (int64_t j = 0; j < wanted; ++j) {
        Candidate best = own;
#pragma unroll
        for (int distance = kWarp / 2; distance; distance /= 2) {
            best.join({__shfl_xor_sync(kAllLanes, best.logit, distance), __shfl_xor_sync(kAllLanes, best.number, distance)});
        }
        if (threadIdx.x % kWarp == 0) of_warps[j % 2][threadIdx.x / kWarp] = best;
        __syncthreads();
#pragma unroll
        for (int warp = 0; warp < kWarps; ++warp) best.join(of_warps[j % 2][warp]);
        if (threadIdx.x == 0) use(j, best);
        if (own.number == best.number) own = next_of_thread(count, at, best);
    }
}

// sums[i] = x [inner] times row i of `weight` [WORDS, inner], by one warp, for all of its lanes.
template <int WORDS>
__device__ __forceinline__ void multiply_words(
    const int8_t* x, const int8_t* weight, int64_t inner, int32_t (&sums)[WORDS]) {
#pragma unroll 1
    for (int64_t column = kCodes * (threadIdx.x % kWarp); column < inner; column += kCodes * kWarp) {
        const int4 a = load_words<int4>(x + column);
#pragma unroll
        for (int i = 0; i < WORDS; ++i) {
            const int4 b = load_words<int4>(weight + i * inner + column);
            sums[i] = __dp4a(a.w, b.w, __dp4a(a.z, b.z, __dp4a(a.y, b.y, __dp4a(a.x, b.x, sums[i]))));
        }
    }
#pragma unroll
    for (int i = 0; i < WORDS; ++i) sums[i] = warp_reduce<Sum>(sums[i]);
}

// log of the sum of the exponentials of a row's logits, for all threads. parts [count, 2]: see next_words_product.cu.
__device__ __forceinline__ float normaliser_of(const float2* parts, int64_t count) {
    float largest = -infinity(), sum = 0.0f;
#pragma unroll 4
    for (int64_t i = threadIdx.x; i < count; i += kThreads) largest = Maximum::join(load_words<float2>(parts + i).x, largest);
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

// groups [R, groups_stride] and parts [R, parts_count, 2]: see next_words_product.cu. chosen [R, chosen_count]: written, the
// best groups; logits [R, chosen_count, 8]: written, those of their words.
LSQ_KERNEL __launch_bounds__(kThreads, 3) lsq_next_words(
    const NextWords op, int64_t inner, In<float> groups, int64_t groups_stride, In<float> parts, int64_t parts_count,
    Out<int32_t> chosen, int64_t chosen_count, Out<float> logits) {
    const int64_t row = blockIdx.x, vocabulary = op.vocabulary;
    const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
    const int8_t* x = op.x.codes + row * inner;
    const float x_scale = op.x.scale[0];
    const float normaliser = normaliser_of(reinterpret_cast<const float2*>(parts + 2 * row * parts_count), parts_count);
    if (op.words) {
        const float* largest = groups + row * groups_stride;
        int32_t* own_groups = chosen + row * chosen_count;
        float* own_logits = logits + row * chosen_count * kVector;
        const int64_t groups_count = (vocabulary + kVector - 1) / kVector;
        take_best(groups_count, chosen_count,
                  [&](int64_t i) { return Candidate{largest[i], static_cast<int32_t>(i)}; },
                  [&](int64_t j, const Candidate& best) {
                      own_groups[j] = static_cast<int32_t>(min(static_cast<int64_t>(best.number), groups_count - 1));
                  });
        __syncthreads();
#pragma unroll 1
        for (int64_t j = warp; j < chosen_count; j += kWarps) {
            const int64_t first = static_cast<int64_t>(own_groups[j]) * kVector;
            int32_t sums[kVector] = {};
            multiply_words(x, op.weight.codes + first * inner, inner, sums);
            int32_t sum = 0;
#pragma unroll
            for (int i = 0; i < kVector; ++i) sum = lane == i ? sums[i] : sum;
            if (lane < kVector) {
                own_logits[j * kVector + lane] = static_cast<float>(sum) * (x_scale * op.weight.scale[first + lane]);
            }
        }
        __syncthreads();
        take_best(chosen_count * kVector, op.best,
                  [&](int64_t i) {
                      const int64_t word = static_cast<int64_t>(own_groups[i / kVector]) * kVector + i % kVector;
                      return word < vocabulary ? Candidate{own_logits[i], static_cast<int32_t>(word)} : Candidate::none();
                  },
                  [&](int64_t j, const Candidate& best) {
                      op.words[row * op.best + j] = min(static_cast<int64_t>(best.number), vocabulary - 1);
                      op.scores[row * op.best + j] = best.logit - normaliser;
                  });
    }
#pragma unroll 1
    for (int64_t j = row * op.asked + warp; j < (row + 1) * op.asked; j += kWarps) {
        const int64_t word = op.wanted[j];
        const bool known = word >= 0 && word < vocabulary;
        int32_t sum[1] = {};
        if (known) multiply_words(x, op.weight.codes + word * inner, inner, sum);
        if (lane == 0) {
            const float logit = known ? static_cast<float>(sum[0]) * (x_scale * op.weight.scale[word]) : not_a_number();
            op.wanted_scores[j] = logit - normaliser;
        }
    }
    if (!op.every) return;
#pragma unroll 4
    for (int64_t v = threadIdx.x; v < vocabulary; v += kThreads) op.every[row * vocabulary + v] -= normaliser;
}
LSQ_EXPORT(lsq_next_words)
