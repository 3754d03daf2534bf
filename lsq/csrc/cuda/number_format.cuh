// The nearest values of a number format, found as lsq/quant/numbers/lookup.py says, and the scales
// of blocks of values.
//
// What cpu/fake_quantize.h has for the CPU, with the same results bit by bit.
#pragma once

#include "vectors.cuh"

namespace lsq {

// Lsq.ops.fake_quantize.STORED.
enum : int64_t { kFloat32 = 0, kBfloat16 = 1, kPower = 2, kMultiplied = 3 };

// A number format, at an address.
class Levels {
public:
    __device__ __forceinline__ explicit Levels(int64_t address)
        : ranks_(reinterpret_cast<const uint8_t*>(address)),
          boundaries_(reinterpret_cast<const float*>(ranks_ + kRanks)),
          values_(boundaries_ + kLevels) {}

    // Of x; for NaN any value.
    __device__ __forceinline__ float nearest(float x) const {
        const uint32_t rank = ranks_[bits_of(x) >> 16];
        return values_[rank + (x > boundaries_[rank] ? 1 : 0)];
    }

private:
    static constexpr int64_t kRanks = 65536 + 64, kLevels = 256;

    const uint8_t* ranks_;
    const float *boundaries_, *values_;
};

// x within [-most, most], NaN as it is.
__device__ __forceinline__ float within(float x, float most) {
    const float low = x < -most ? -most : x;
    return low > most ? most : low;
}

// NaN in place of what is not finite.
__device__ __forceinline__ float finite(float x) { return poisoned(x, !(x < infinity())); }

// What comes back of a scale.
__device__ __forceinline__ float stored_scale(float scale, int64_t stored) {
    if (stored == kFloat32) return scale;
    if (!(scale < infinity())) return not_a_number();
    const uint32_t bits = bits_of(scale);
    if (stored == kBfloat16) return float_of((bits + 0x7FFFu + (bits >> 16 & 1u)) & 0xFFFF0000u);
    if (!(scale > 0.0f)) return float_of(0x00800000u);  // 2^-126
    if (bits <= 0x00400000u) return float_of(0x00400000u);  // 2^-127
    const uint32_t above = (bits + 0x007FFFFFu) & 0x7F800000u;
    return float_of(above < 0x7F000000u ? above : 0x7F000000u);  // up to 2^127
}

// The blocks of a FakeQuantize that share a scale each.
class Blocks {
public:
    // largest [down, across]: the bits of the largest magnitudes; tops: of rows of those, or of
    // all, where scales are multiples of one that no clip gives.
    __device__ __forceinline__ Blocks(const FakeQuantize& op, const uint32_t* largest,
                                      const uint32_t* tops)
        : clip(op.clip), columns(op.columns), height(op.block_rows), width(op.block_columns),
          across((op.columns + op.block_columns - 1) / op.block_columns), stored_(op.stored),
          largest_(largest), tops_(tops), given_(op.given), each_row_(op.each_row),
          clip_of_row_(op.clips > 1), one_clip_(op.clips == 1), value_(op.largest),
          multiple_(op.largest_multiplier), multipliers_(op.multipliers) {}

    __device__ __forceinline__ float clip_of(int64_t row) const {
        return clip ? clip[clip_of_row_ ? row : 0] : infinity();
    }

    // Of the block in this row of blocks and this column of them.
    __device__ __forceinline__ float scale(int64_t strip, int64_t place) const {
        const float most =
            given_ ? clip_of(strip) : finite(float_of(largest_[strip * across + place]));
        const float scale = most / value_;
        return stored_ == kMultiplied ? multiple(strip, scale) : stored_scale(scale, stored_);
    }

    const float* clip;
    int64_t columns, height, width, across;

private:
    // The nearest multiple of the scale that all share.
    __device__ __forceinline__ float multiple(int64_t strip, float scale) const {
        float most = one_clip_ && !each_row_ ? clip[0] / value_ : 0.0f;
        if (each_row_ || !one_clip_) most = finite(float_of(tops_[each_row_ ? strip : 0]) / value_);
        const float unit = most / multiple_;
        const float near = multipliers_.nearest(unit == 0.0f ? 0.0f : scale / unit) * unit;
        return poisoned(near, scale != scale);
    }

    int64_t stored_;
    const uint32_t *largest_, *tops_;
    bool given_, each_row_, clip_of_row_, one_clip_;
    float value_, multiple_;
    Levels multipliers_;
};

// An element on its way through rows and the blocks in them.
struct Place {
    int64_t row, column, strip, block, end;  // the end of the block's columns

    __device__ __forceinline__ Place(const Blocks& blocks, int64_t element)
        : row(element / blocks.columns), column(element - row * blocks.columns) {
        locate(blocks);
    }

    // To the next one. -> whether that lies in another row, or another block
    __device__ __forceinline__ bool step(const Blocks& blocks) {
        if (++column < end) return false;
        if (column == blocks.columns) ++row, column = 0;
        locate(blocks);
        return true;
    }

private:
    __device__ __forceinline__ void locate(const Blocks& blocks) {
        strip = row / blocks.height;
        block = column / blocks.width;
        const int64_t past = (block + 1) * blocks.width;
        end = past < blocks.columns ? past : blocks.columns;
    }
};

}  // namespace lsq
