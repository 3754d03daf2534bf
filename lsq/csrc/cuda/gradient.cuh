// Epilogue of backward kernels that make the gradient of a product: sums for the bias, then the
// gradient.
//
// -DROUNDED=1: rounded per row at random after multiplying by the weight's scales
// (backward="int8"); 0: Float.
#pragma once

#include "rounding.cuh"
#include "rows.cuh"

namespace lsq {

// Random words of a thread's rows, in the order of for_rows. Each lane of a warp, whose threads
// share rows, draws the word of another turn.
class RowWords {
public:
    // All threads of the warp must call this.
    LSQ_INLINE uint32_t next(int64_t key, int64_t subsequence, int64_t row) {
        const int lane = threadIdx.x % kWarp;
        if (turn_ == 0)
            drawn_ =
                philox_word(key, subsequence, row + static_cast<int64_t>(lane) * kRows * gridDim.x);
        const uint32_t word = __shfl_sync(kAllLanes, drawn_, turn_);
        turn_ = (turn_ + 1) % kWarp;
        return word;
    }

private:
    static_assert(LANES % kWarp == 0, "a row has whole warps");
    int turn_ = 0;
    uint32_t drawn_ = 0;
};

// Takes the gradient of a product [M, COLUMNS]: to `floats`, or to `rounded` if -DROUNDED.
struct GradientSink {
    Float* floats;
    int8_t* codes;
    float* row_scale;           // [M]
    const float* weight_scale;  // [COLUMNS]
    const int64_t* key;
    int64_t subsequence;
    float q;
    ColumnSums bias_sums = {};
    RowWords words;

    LSQ_INLINE GradientSink(Float* to, const RoundedGradient& rounded)
        : floats(to), codes(rounded.codes), row_scale(rounded.scale),
          weight_scale(rounded.weight_scale), key(rounded.key), subsequence(rounded.subsequence),
          q(rounded.largest) {}

    // `inside`: the row exists. Changes `gradient`. All threads of the block must call this.
    LSQ_INLINE void add(int64_t row, bool inside, Values& gradient) {
        if (inside) {
#pragma unroll
            for (int v = 0; v < kVectors; ++v) {
                if (has(v)) bias_sums.add(v, gradient[v]);
            }
        }
        write(row, inside, gradient);
    }

    // add() without sums.
    LSQ_INLINE void write(int64_t row, bool inside, Values& gradient) {
#if ROUNDED
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
            if (!has(v)) continue;
            float scale[kVector];
            load8(weight_scale + column_of(v), scale);
#pragma unroll
            for (int i = 0; i < kVector; ++i) gradient[v][i] *= scale[i];
        }
        const GradientScale s = gradient_scale(row_largest(gradient), q);
        const uint32_t word = words.next(key[0], subsequence, row);
        if (inside && threadIdx.x % LANES == 0) row_scale[row] = s.scale;
#endif
        if (!inside) return;
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
            if (!has(v)) continue;
            const int64_t element = row * COLUMNS + column_of(v);
#if ROUNDED
            const uint32_t first = word + column_of(v) * kWordStep;
            store_words(codes + element, round8_at_random(gradient[v], s.reciprocal, first, q));
#else
            store8(floats + element, gradient[v]);
#endif
        }
    }
};

}  // namespace lsq
