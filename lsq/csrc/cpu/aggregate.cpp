// Sums over the neighbours of nodes, with the epilogue of a graph layer, and their gradient;
// lsq/ops/aggregate.py has the formulas.
#include "lanes.h"
#include "row_epilogue.h"
#include "strips.h"

using namespace lsq;

namespace {

constexpr int64_t kFull = 256;  // codes whose sum fits into 16 bits
constexpr int64_t kAhead = 16;  // neighbours whose rows are fetched ahead

#if defined(LSQ_WIDE)
constexpr int kShorts = 32;
#elif defined(__AVX2__)
constexpr int kShorts = 16;
#else
constexpr int kShorts = 8;
#endif
typedef int16_t Shorts __attribute__((vector_size(2 * kShorts)));

Shorts widened(const int8_t* codes) {
#if defined(LSQ_WIDE)
    const auto* bytes = reinterpret_cast<const __m256i_u*>(codes);
    return (Shorts)_mm512_cvtepi8_epi16(_mm256_loadu_si256(bytes));
#elif defined(__AVX2__)
    return (Shorts)_mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i_u*>(codes)));
#else
    Shorts wide;
    for (int lane = 0; lane < kShorts; ++lane) wide[lane] = codes[lane];
    return wide;
#endif
}

Lanes loaded(const float* x) {
    Lanes found;
    std::memcpy(&found, x, sizeof found);
    return found;
}

// The first `count` of a vector; others are 0.
Shorts widened(const int8_t* codes, int64_t count) {
#if defined(LSQ_WIDE)
    const auto there = static_cast<__mmask32>((uint64_t{1} << count) - 1);
    return (Shorts)_mm512_cvtepi8_epi16(_mm256_maskz_loadu_epi8(there, codes));
#else
    int8_t part[kShorts] = {};
    std::memcpy(part, codes, count);
    return widened(part);
#endif
}

Lanes loaded(const float* x, int64_t count) {
#if defined(LSQ_WIDE)
    return _mm512_maskz_loadu_ps(static_cast<__mmask16>((1u << count) - 1), x);
#else
    float part[kLanes] = {};
    std::memcpy(part, x, count * sizeof(float));
    return loaded(part);
#endif
}

// The edges that lead to one node: where they come from.
struct Sources {
    const int32_t* nodes;
    int64_t count;

    Sources(const int32_t* first, int64_t edges) : nodes(first), count(edges) {}
    Sources(const Edges& edges, int64_t row)
        : nodes(edges.indices + edges.indptr[row]),
          count(edges.indptr[row + 1] - edges.indptr[row]) {}

    template <class T>
    void fetch_ahead(const T* x, int64_t n, int64_t edge) const {
        if (edge + kAhead < count) __builtin_prefetch(x + nodes[edge + kAhead] * n);
    }
};

// Sums of V vectors of codes over at most kFull sources; of the last vector, `last` codes -> sums.
template <int V>
inline void add_codes(const int8_t* codes, const Sources& from, int64_t n, int64_t last,
                      Shorts (&sum)[V]) {
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) sum[v] = Shorts{};
    for (int64_t edge = 0; edge < from.count; ++edge) {
        const int8_t* row = codes + from.nodes[edge] * n;
        from.fetch_ahead(codes, n, edge);
#pragma GCC unroll 4
        for (int v = 0; v < V - 1; ++v) sum[v] += widened(row + v * kShorts);
        row += (V - 1) * kShorts;
        sum[V - 1] += last == kShorts ? widened(row) : widened(row, last);
    }
}

// Sums of V vectors of floats, each row times its factor unless that is null -> sums [V * kLanes].
template <int V>
void add_floats(const float* x, const float* factor, const Sources& from, int64_t n, int64_t last,
                float* sums) {
    Lanes sum[V] = {};
    for (int64_t edge = 0; edge < from.count; ++edge) {
        const int64_t node = from.nodes[edge];
        const float* row = x + node * n;
        from.fetch_ahead(x, n, edge);
        const float times = factor ? factor[node] : 1.0f;
#pragma GCC unroll 8
        for (int v = 0; v < V - 1; ++v) sum[v] += loaded(row + v * kLanes) * times;
        row += (V - 1) * kLanes;
        sum[V - 1] += (last == kLanes ? loaded(row) : loaded(row, last)) * times;
    }
    std::memcpy(sums, sum, sizeof sum);
}

// Calls take(vectors, column, columns of the last vector) for blocks of columns that make up n.
template <int LANES, int MOST, class Take>
void each_block(int64_t n, const Take& take) {
    for (int64_t c = 0; c < n; c += MOST * LANES) {
        const int64_t columns = std::min<int64_t>(n - c, MOST * LANES);
        const int64_t vectors = (columns + LANES - 1) / LANES;
        const int64_t last = columns - (vectors - 1) * LANES;
        if (vectors == 1) take(std::integral_constant<int, 1>(), c, last);
        if (vectors == 2) take(std::integral_constant<int, 2>(), c, last);
        if (vectors == 3) take(std::integral_constant<int, 3>(), c, last);
        if (vectors == 4) take(std::integral_constant<int, 4>(), c, last);
        if constexpr (MOST == 8) {
            if (vectors == 5) take(std::integral_constant<int, 5>(), c, last);
            if (vectors == 6) take(std::integral_constant<int, 6>(), c, last);
            if (vectors == 7) take(std::integral_constant<int, 7>(), c, last);
            if (vectors == 8) take(std::integral_constant<int, 8>(), c, last);
        }
    }
}

// Sums [n] have room for a vector behind them.
void sum_codes(const int8_t* codes, const Sources& from, int64_t n, int16_t* sums) {
    each_block<kShorts, 4>(n, [&](auto vectors, int64_t c, int64_t last) {
        Shorts sum[vectors.value];
        add_codes<vectors.value>(codes + c, from, n, last, sum);
        std::memcpy(sums + c, sum, sizeof sum);
    });
}

void sum_floats(const float* x, const float* factor, const Sources& from, int64_t n, float* sums) {
    each_block<kLanes, 8>(n, [&](auto vectors, int64_t c, int64_t last) {
        add_floats<vectors.value>(x + c, factor, from, n, last, sums + c);
    });
}

// Makes rows of an Aggregate on one thread.
class Aggregation {
public:
    explicit Aggregation(const Aggregate& op)
        : op_(op), n_(op.columns), short_(n_ + kShorts), long_(n_), floats_(n_ + kLanes),
          end_(op.nonlinearity, op.rounded, {op.out, 0}, n_) {}

    // -> the largest magnitude
    Magnitude operator()(int64_t first, int64_t rows) {
        Magnitude largest = 0;
#if defined(LSQ_WIDE)
        if (op_.x.coded.codes && end_.straight()) {
            for (int64_t row = first; row < first + rows; ++row) {
                const Sources from(op_.edges, row);
                if (from.count <= kFull) {
                    largest = std::max(largest, end_short(row, from));
                } else {
                    with_sums(row, [&](const auto* sums) {
                        largest = std::max(largest, end_sums(row, sums));
                    });
                }
            }
            return largest;
        }
#endif
        return end_.end(first, rows, [&](int64_t i, float* y) {
            const int64_t row = first + i;
            with_sums(row, [&](const auto* sums) { scale(row, sums, y); });
            if (op_.root) add_to(op_.root + row * n_, n_, y);
            if (op_.bias) add_to(op_.bias, n_, y);
        });
    }

private:
    // Calls use(sums [n]) with the sums of a row: of 16 or 32 bits, or floats.
    template <class Use>
    void with_sums(int64_t row, const Use& use) {
        const Sources from(op_.edges, row);
        const int8_t* codes = op_.x.coded.codes;
        if (!codes) {
            sum_floats(op_.x.floats, nullptr, from, n_, floats_.data());
            use(static_cast<const float*>(floats_.data()));
        } else if (from.count <= kFull) {
            sum_codes(codes, from, n_, short_.data());
            use(static_cast<const int16_t*>(short_.data()));
        } else {
            std::fill(long_.begin(), long_.end(), 0);
            for (int64_t first = 0; first < from.count; first += kFull) {
                const int64_t count = std::min(kFull, from.count - first);
                sum_codes(codes, {from.nodes + first, count}, n_, short_.data());
#pragma omp simd
                for (int64_t i = 0; i < n_; ++i) long_[i] += short_[i];
            }
            use(static_cast<const int32_t*>(long_.data()));
        }
    }

    // Factor of the sums of a row.
    float factor(int64_t row) const {
        const float scale = op_.x.coded.codes ? op_.x.coded.scale[0] : 1.0f;
        return op_.factor ? scale * op_.factor[row] : scale;
    }

#if defined(LSQ_WIDE)
    // What makes values of a row from its sums.
    struct RowEnd {
        const int8_t* codes;  // of the row itself; null: it is no neighbour of its own
        const float *root, *bias;
        __m512 own, factor;

        LSQ_FORCED __m512 operator()(int64_t i, __mmask16 there, __m512 y) const {
            if (codes) {
                const __m128i sixteen = _mm_maskz_loadu_epi8(there, codes + i);
                const __m512 of_own = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(sixteen));
                y = _mm512_add_ps(y, _mm512_mul_ps(own, of_own));
            }
            y = _mm512_mul_ps(y, factor);
            if (root) y = _mm512_add_ps(y, _mm512_maskz_loadu_ps(there, root + i));
            return bias ? _mm512_add_ps(y, _mm512_maskz_loadu_ps(there, bias + i)) : y;
        }
    };

    RowEnd row_end(int64_t row) const {
        const float own = op_.own ? op_.own[0] : 0.0f;
        return {own != 0.0f ? op_.x.coded.codes + row * n_ : nullptr,
                op_.root ? op_.root + row * n_ : nullptr, op_.bias, _mm512_set1_ps(own),
                _mm512_set1_ps(factor(row))};
    }

    // Sums a row in registers, and takes its sums there -> the largest magnitude.
    Magnitude end_short(int64_t row, const Sources& from) {
        const RowEnd end = row_end(row);
        const int8_t* codes = op_.x.coded.codes;
        return end_.with_straight(row, [&](auto& straight) {
            each_block<kShorts, 4>(n_, [&](auto vectors, int64_t c, int64_t last) {
                constexpr int V = vectors.value;
                Shorts sum[V];
                add_codes<V>(codes + c, from, n_, last, sum);
                int64_t column = c;
#pragma GCC unroll 4
                for (int v = 0; v < V; ++v) {
#pragma GCC unroll 2
                    for (int half = 0; half < 2; ++half) {
                        const int64_t i = c + v * kShorts + 16 * half, left = n_ - i;
                        if (left <= 0) break;
                        const __mmask16 there = left < 16 ? (1u << left) - 1 : kAllLanes;
                        const auto whole = (__m512i)sum[v];
                        const __m256i part = half ? _mm512_extracti64x4_epi64(whole, 1)
                                                  : _mm512_castsi512_si256(whole);
                        const __m512 y = _mm512_cvtepi32_ps(_mm512_cvtepi16_epi32(part));
                        straight.take(i, i % 64, there, end(i, there, y));
                    }
                    if (v % 2 == 0 && v + 1 < V) continue;
                    straight.store(column, std::min<int64_t>(64, n_ - column));
                    column += 64;
                }
            });
        });
    }

    static __m512 sixteen(const int32_t* sums, __mmask16 there) {
        return _mm512_cvtepi32_ps(_mm512_maskz_loadu_epi32(there, sums));
    }
    static __m512 sixteen(const int16_t* sums, __mmask16 there) {
        return _mm512_cvtepi32_ps(_mm512_cvtepi16_epi32(_mm256_maskz_loadu_epi16(there, sums)));
    }
    static __m512 sixteen(const float* sums, __mmask16 there) {
        return _mm512_maskz_loadu_ps(there, sums);
    }

    // Takes the sums of a row -> the largest magnitude.
    template <class Sum>
    Magnitude end_sums(int64_t row, const Sum* sums) {
        const RowEnd end = row_end(row);
        return end_.end_straight(row, [&](int64_t i, __mmask16 there) LSQ_FORCED {
            return end(i, there, sixteen(sums + i, there));
        });
    }

#endif
    // Sums of a row, its own term and its factor -> y.
    template <class Sum>
    void scale(int64_t row, const Sum* sums, float* y) const {
        const float own = op_.own ? op_.own[0] : 0.0f, times = factor(row);
        const auto with = [&](const auto* x) {
#pragma omp simd
            for (int64_t i = 0; i < n_; ++i)
                y[i] = (static_cast<float>(sums[i]) + own * static_cast<float>(x[i])) * times;
        };
        if (own == 0.0f) {
#pragma omp simd
            for (int64_t i = 0; i < n_; ++i) y[i] = static_cast<float>(sums[i]) * times;
        } else if (op_.x.coded.codes) {
            with(op_.x.coded.codes + row * n_);
        } else {
            with(op_.x.floats + row * n_);
        }
    }

    const Aggregate& op_;
    int64_t n_;
    Aligned<int16_t> short_;
    Aligned<int32_t> long_;
    Aligned<float> floats_;
    RowEpilogue end_;
};

}  // namespace

LSQ_OPERATION(Aggregate, op) {
    Magnitude largest = 0;
#pragma omp parallel reduction(max : largest)
    {
        Aggregation rows(op);
#pragma omp for schedule(dynamic)
        for (int64_t first = 0; first < op.rows; first += kTilePair)
            largest = std::max<Magnitude>(
                largest, rows(first, std::min<int64_t>(kTilePair, op.rows - first)));
    }
    finish(op.rounded, largest);
}

LSQ_OPERATION(AggregateGradient, op) {
    const int64_t n = op.columns;
    const float own = op.own ? op.own[0] : 0.0f;
    const Blocks blocks(op.rows);
    ColumnSums sums(blocks.count, n, op.sum);
    GradientSink sink(blocks, n, op.dx, op.rounded, nullptr);
    std::vector<double> clips(blocks.count);
    for_blocks(blocks, n + kLanes, [&](int64_t block, int64_t row, Scratch& scratch) {
        const float* gradient = op.gradient + row * n;
        float* g = scratch.a.data();
        if (op.sum) sums.add(block, gradient);
        if (!sink.wanted()) return;
        sum_floats(op.gradient, op.factor, {op.edges, row}, n, g);
        if (own != 0.0f) {
            const float times = op.factor ? op.factor[row] : 1.0f;
#pragma omp simd
            for (int64_t i = 0; i < n; ++i) g[i] += own * (gradient[i] * times);
        }
        clips[block] += straight_through(op.x, row * n, n, g);
        if (op.row_factor) multiply(op.row_factor[row], n, g);
        sink.add(block, row, g, scratch.b.data());
    });
    sums.write(op.sum);
    write_sum(clips, op.x.clip_factor, op.dclip);
}
