// A product with a packed weight and its epilogue; threads share the weight's outputs.
#include "nonlinearity.h"
#include "aligned.h"
#include "packed.h"

using namespace lsq;

namespace {

constexpr int64_t kStrip = 32;         // rows, whose sums stay in the first cache
constexpr int64_t kSparseStrip = 256;  // rows for which a sparse weight is expanded
constexpr int64_t kUnpackedStrip = 128;  // rows for which narrow codes are unpacked

class PackedEpilogue {
public:
    explicit PackedEpilogue(const PackedProject& op)
        : op_(op), y_(kChunk), alpha_(kChunk), flags_(kChunk) {}

    Magnitude largest() const { return largest_; }

    // Takes rows [first, first + rows) of outputs [begin, begin + n), `stride` apart.
    void operator()(int64_t first, int64_t rows, int64_t begin, int64_t n, const int32_t* sums,
                    int64_t stride) {
        const float* bias = op_.bias ? op_.bias + begin : nullptr;
        if (!op_.x.by_row) set_factors(op_.x.scale[0], begin, n);
#if defined(LSQ_WIDE)
        if (straight()) {
            largest_ = std::max(largest_, round_sums(first, rows, begin, n, sums, stride, bias));
            return;
        }
#endif
        for (int64_t row = 0; row < rows; ++row, sums += stride) {
            const int64_t element = (first + row) * op_.weight.columns + begin;
            float* y = op_.out ? op_.out + element : y_.data();
            if (op_.x.by_row) set_factors(op_.x.scale[first + row], begin, n);
            scale_sums(sums, n, alpha_.data(), bias, y);
            activate(y, n);
            if (op_.rounded.codes)
                largest_ = std::max(largest_, round_row(op_.rounded, element, n, y, flags_.data()));
        }
    }

private:
#if defined(LSQ_WIDE)
    // Whether rows go from sums to codes in registers.
    bool straight() const {
        const Coded& to = op_.rounded;
        if (!to.codes || op_.out || !is_cut(op_.activation) || op_.x.by_row) return false;
        return WideClip::fits(to.clip[0]);
    }

    Magnitude round_sums(int64_t first, int64_t rows, int64_t begin, int64_t n, const int32_t* sums,
                         int64_t stride, const float* bias) const {
        const float *alpha = alpha_.data(), clip = op_.rounded.clip[0];
        const WideClip wide(clip, clip / op_.rounded.largest);
        const bool is_relu = op_.activation == Activation::relu;
        const __m512 zero = _mm512_setzero_ps();
        __m512i largest = _mm512_setzero_si512();
        for (int64_t row = 0; row < rows; ++row, sums += stride) {
            int8_t* codes = op_.rounded.codes + (first + row) * op_.weight.columns + begin;
            each_sixteen(n, [&](int64_t i, __mmask16 there) {
                const __m512 sum = _mm512_cvtepi32_ps(_mm512_maskz_loadu_epi32(there, sums + i));
                __m512 y = _mm512_mul_ps(sum, _mm512_maskz_loadu_ps(there, alpha + i));
                if (bias) y = _mm512_add_ps(y, _mm512_maskz_loadu_ps(there, bias + i));
                if (is_relu) y = _mm512_max_ps(zero, y);  // NaN stays NaN
                wide.round(y, there, codes + i, largest);
            });
        }
        return _mm512_reduce_max_epu32(largest);
    }

#endif
    // Sets the factors of outputs [begin, begin + n).
    void set_factors(float input, int64_t begin, int64_t n) {
        const float* scale = op_.weight.scale + begin;
        float* alpha = alpha_.data();
#pragma omp simd
        for (int64_t i = 0; i < n; ++i) alpha[i] = input * scale[i];
    }

    void activate(float* y, int64_t n) const {
        with_activation(op_.activation, [=](auto kind) {
            if constexpr (kind == Activation::none) return;
#pragma omp simd
            for (int64_t i = 0; i < n; ++i) y[i] = activated<kind>(y[i]);
        });
    }

    const PackedProject& op_;
    Aligned<float> y_, alpha_;
    Aligned<uint8_t> flags_;
    Magnitude largest_ = 0;
};

}  // namespace

LSQ_OPERATION(PackedProject, op) {
    const TileProduct product = packed_product(op.x, op.weight, op.rows);
    const int64_t strip = op.weight.sparse                        ? kSparseStrip
                          : op.weight.step || op.weight.bits == 4 ? kUnpackedStrip
                                                                  : kStrip;
    Magnitude largest = 0;
    multiply_columns<int32_t>(op.rows, op.weight.columns, strip, [&](const auto& use) {
        PackedEpilogue end(op);
        with_multiplier(product, op.weight, [&](auto& multiplier) { use(multiplier, end); });
#pragma omp critical
        largest = std::max(largest, end.largest());
    });
    finish(op.rounded, largest);
}
