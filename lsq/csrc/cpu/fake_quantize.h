// Nearest values of a number format (lsq/quant/numbers/lookup.py), and stored scales.
#pragma once

#include <cmath>

#include "rows.h"

namespace lsq {

// Numbers of lsq.ops.fake_quantize.STORED.
enum : int64_t { kFloat32 = 0, kBfloat16 = 1, kPower = 2, kMultiplied = 3 };

// A number format in memory.
class Levels {
public:
    explicit Levels(int64_t address)
        : ranks_(reinterpret_cast<const uint8_t*>(address)),
          boundaries_(reinterpret_cast<const float*>(ranks_ + kRanks)),
          values_(boundaries_ + kLevels) {}

    // The number of values below the nearest one.
    int32_t rank(float x) const {
        const uint32_t rank = ranks_[bits_of(x) >> 16];
        return rank + (x > boundaries_[rank]);
    }

    float value(int32_t rank) const { return values_[rank]; }
    float nearest(float x) const { return value(rank(x)); }

#if defined(LSQ_WIDE)
    __m512i rank(__m512 x) const {
        const __m512i upper = _mm512_srli_epi32(_mm512_castps_si512(x), 16);
        const __m512i rank =
            _mm512_and_si512(_mm512_i32gather_epi32(upper, ranks_, 1), _mm512_set1_epi32(255));
        const __mmask16 above =
            _mm512_cmp_ps_mask(x, _mm512_i32gather_ps(rank, boundaries_, 4), _CMP_GT_OQ);
        return _mm512_mask_add_epi32(rank, above, rank, _mm512_set1_epi32(1));
    }

    __m512 value(__m512i rank) const { return _mm512_i32gather_ps(rank, values_, 4); }
#endif

private:
    static constexpr int64_t kRanks = 65536 + 64, kLevels = 256;

    const uint8_t* ranks_;
    const float *boundaries_, *values_;
};

// x within [-most, most], NaN as it is.
struct Clip {
    float most;

    float operator()(float x) const {
        const float low = x < -most ? -most : x;
        return low > most ? most : low;
    }
};

inline Clip clip_of(const FakeQuantize& op, int64_t row) {
    return {op.clip ? op.clip[op.clips > 1 ? row : 0] : infinity()};
}

// A scale as it is read back.
inline float stored_scale(float scale, int64_t stored) {
    if (stored == kFloat32) return scale;
    if (!(scale < infinity())) return not_a_number();
    if (stored == kBfloat16) {
        const uint32_t bits = bits_of(scale);
        return float_of((bits + 0x7FFFu + (bits >> 16 & 1u)) & 0xFFFF0000u);
    }
    int exponent = -127;
    const bool power = scale > 0.0f && std::frexp(scale, &exponent) == 0.5f;
    return std::ldexp(1.0f, std::min(std::max(exponent - power, -127), 127));
}

// Codes beside values: none, values / scale * `whole`, or ranks.
enum class Coding { none, whole, ranks };

// x [n] of a block -> values; NaN stays, and has any code.
template <Coding CODING>
void decoded(const Levels& levels, const Clip& clip, float scale, int64_t n, const float* x,
             float* out, int8_t* codes, float whole) {
#if defined(LSQ_WIDE)
    const __m512 most = _mm512_set1_ps(clip.most), least = _mm512_set1_ps(-clip.most),
                 unit = _mm512_set1_ps(scale);
    const __mmask16 divides = scale == 0.0f ? 0 : kAllLanes;
    each_sixteen(n, [&](int64_t i, __mmask16 there) {
        const __m512 given = _mm512_maskz_loadu_ps(there, x + i);
        const __m512 bounded = _mm512_min_ps(most, _mm512_max_ps(least, given));  // NaN stays NaN
        const __m512i rank = levels.rank(_mm512_maskz_div_ps(divides, bounded, unit));
        const __m512 level = levels.value(rank);
        const __mmask16 missing = _mm512_cmp_ps_mask(given, given, _CMP_UNORD_Q);
        _mm512_mask_storeu_ps(out + i, there,
                              _mm512_mask_mov_ps(_mm512_mul_ps(level, unit), missing, given));
        if constexpr (CODING == Coding::ranks)
            _mm_mask_storeu_epi8(codes + i, there, _mm512_cvtepi32_epi8(rank));
        if constexpr (CODING == Coding::whole) {
            const __m512 code = _mm512_mul_ps(level, _mm512_set1_ps(whole));
            _mm_mask_storeu_epi8(codes + i, there, _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(code)));
        }
    });
#else
    for (int64_t i = 0; i < n; ++i) {
        const int32_t rank = levels.rank(scale == 0.0f ? 0.0f : clip(x[i]) / scale);
        const float level = levels.value(rank);
        out[i] = x[i] == x[i] ? level * scale : x[i];
        if constexpr (CODING == Coding::ranks) codes[i] = static_cast<int8_t>(rank);
        if constexpr (CODING == Coding::whole) codes[i] = static_cast<int8_t>(level * whole);
    }
#endif
}

}  // namespace lsq
