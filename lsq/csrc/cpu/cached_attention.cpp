// Attention of one query per row to keys and values anywhere in a cache of codes;
// lsq/ops/cached_attention.py is the reference. Scores are exact sums of products of codes;
// probabilities and contexts are floats.
#include "aligned.h"
#include "lanes.h"
#include "rows.h"

using namespace lsq;

namespace {

constexpr int64_t kColumns = 4 * kLanes;  // of a context that registers hold

int32_t dot(const int16_t* query, const int8_t* key, int64_t n) {
    int32_t sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < n; ++i) sum += static_cast<int32_t>(query[i]) * key[i];
    return sum;
}

constexpr int64_t kFour = 4;

// Scores of four keys, `n` columns each.
void dot_four(const int16_t* query, const int8_t* const* keys, int64_t n, int32_t* scores) {
#if defined(LSQ_WIDE)
    if (n % 32 == 0) {
        __m512i sum[kFour] = {};
        for (int64_t i = 0; i < n; i += 32) {
            const __m512i factor = _mm512_loadu_si512(query + i);
            for (int64_t j = 0; j < kFour; ++j) {
                const __m256i codes =
                    _mm256_loadu_si256(reinterpret_cast<const __m256i*>(keys[j] + i));
                sum[j] = _mm512_add_epi32(sum[j],
                                          _mm512_madd_epi16(_mm512_cvtepi8_epi16(codes), factor));
            }
        }
        const __m512i ab = _mm512_add_epi32(_mm512_unpacklo_epi32(sum[0], sum[1]),
                                            _mm512_unpackhi_epi32(sum[0], sum[1]));
        const __m512i cd = _mm512_add_epi32(_mm512_unpacklo_epi32(sum[2], sum[3]),
                                            _mm512_unpackhi_epi32(sum[2], sum[3]));
        const __m512i all =
            _mm512_add_epi32(_mm512_unpacklo_epi64(ab, cd), _mm512_unpackhi_epi64(ab, cd));
        const __m256i half =
            _mm256_add_epi32(_mm512_castsi512_si256(all), _mm512_extracti64x4_epi64(all, 1));
        const __m128i sums =
            _mm_add_epi32(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(scores), sums);
        return;
    }
#endif
    for (int64_t j = 0; j < kFour; ++j) scores[j] = dot(query, keys[j], n);
}

// Reads the cache for one head of a row at a time, on one thread.
class Reader {
public:
    explicit Reader(const CachedAttention& op)
        : op_(op), stride_(2 * op.columns),
          factor_(op.queries.scale[0] * op.cache_scale[0] *
                  (1.0f / std::sqrt(static_cast<float>(op.width)))),
          query_(op.width + 32), scores_(op.capacity), probabilities_(op.capacity + kLanes),
          context_(op.width + kColumns), flags_(op.width) {}

    // -> the largest magnitude
    Magnitude operator()(int64_t row, int64_t head) {
        const int64_t list = op_.owned[row], n = op_.lengths[list], width = op_.width,
                      column = head * width;
        const int64_t* slots = op_.lists + list * op_.capacity;
        const int8_t* query = op_.queries.codes + row * op_.query_columns + column;
        std::fill(context_.begin(), context_.end(), 0.0f);
        if (n > 0) {
            if (op_.appends) {
                int8_t* own = op_.cache + slots[n - 1] * stride_ + column;
                std::memcpy(own, query + op_.columns, width);
                std::memcpy(own + op_.columns, query + 2 * op_.columns, width);
            }
            attend(query, slots, n, op_.cache + column);
        }
        return round_row(op_.context, row * op_.columns + column, width, context_.data(),
                         flags_.data());
    }

private:
    void attend(const int8_t* query, const int64_t* slots, int64_t n, const int8_t* cache) {
        const int64_t width = op_.width;
        std::copy_n(query, width, query_.data());
        int64_t j = 0;
        for (; j + kFour <= n; j += kFour) {
            const int8_t* keys[kFour];
            for (int64_t i = 0; i < kFour; ++i) {
                keys[i] = cache + slots[j + i] * stride_;
                __builtin_prefetch(keys[i] + op_.columns);  // the value
            }
            dot_four(query_.data(), keys, width, scores_.data() + j);
        }
        for (; j < n; ++j) scores_[j] = dot(query_.data(), cache + slots[j] * stride_, width);
        const int32_t largest = *std::max_element(scores_.begin(), scores_.begin() + n);
        float* p = probabilities_.data();
        for (int64_t j = 0; j < n; ++j) p[j] = static_cast<float>(scores_[j] - largest) * factor_;
        Lanes sum = {};
        for_lanes(n, [&](int64_t j, auto seen) {
            lanes_at(p + j) = seen(bounded_exponential(lanes_at(p + j)), 0.0f);
            sum += lanes_at(p + j);
        });
        const float share = op_.cache_scale[0] / sum_of_lanes(sum);
        for (int64_t column = 0; column < width; column += kColumns) {
            add_values(slots, n, cache + op_.columns + column, width - column, share,
                       context_.data() + column);
        }
    }

    // Makes up to kColumns columns of the context; `wide`: columns from there on.
    void add_values(const int64_t* slots, int64_t n, const int8_t* values, int64_t wide,
                    float share, float* to) const {
        Lanes sums[4] = {};
        for (int64_t j = 0; j < n; ++j) {
            const int8_t* value = values + slots[j] * stride_;
            __builtin_prefetch(value - op_.columns + op_.width);  // the next head's key
            const Lanes p = all_lanes(probabilities_[j]);
            if (wide >= kColumns) {
#pragma GCC unroll 4
                for (int i = 0; i < 4; ++i)
                    sums[i] = multiply_add(p, load_lanes(value + i * kLanes, kLanes), sums[i]);
            } else {
                for (int i = 0; i < 4 && i * kLanes < wide; ++i) {
                    sums[i] =
                        multiply_add(p, load_lanes(value + i * kLanes, wide - i * kLanes), sums[i]);
                }
            }
        }
        for (int i = 0; i < 4; ++i) store_lanes(to + i * kLanes, sums[i] * share, kLanes);
    }

    const CachedAttention& op_;
    int64_t stride_;
    float factor_;
    std::vector<int16_t> query_;
    std::vector<int32_t> scores_;
    Aligned<float> probabilities_, context_;
    std::vector<uint8_t> flags_;
};

}  // namespace

LSQ_OPERATION(CachedAttention, op) {
    // Heads of rows, up to which other threads are not worth waking.
    constexpr int64_t kLittle = 16;
    Magnitude largest = 0;
#pragma omp parallel reduction(max : largest) if (op.rows * op.heads > kLittle)
    {
        Reader read(op);
#pragma omp for schedule(static)
        for (int64_t item = 0; item < op.rows * op.heads; ++item) {
            largest = std::max(largest, read(item / op.heads, item % op.heads));
        }
    }
    finish(op.context, largest);
}
