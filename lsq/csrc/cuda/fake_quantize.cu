// Rounds to the values of a number format; lsq/ops/fake_quantize.py is the reference,
// cpu/fake_quantize.h has the same results bit by bit.
//
// A thread takes 8 neighbouring values. -DWHOLE=1: they lie in one row, and in one block with a
// scale; 0: rows, blocks and the tensor may end among them.
#include "random.cuh"
#include "reduce.cuh"

namespace {

// Numbers of lsq.ops.fake_quantize.STORED.
enum : int64_t { kFloat32 = 0, kBfloat16 = 1, kPower = 2, kMultiplied = 3 };

// A number format in memory (lsq/quant/numbers/lookup.py).
class Levels {
public:
    LSQ_INLINE explicit Levels(int64_t address)
        : ranks_(reinterpret_cast<const uint8_t*>(address)),
          boundaries_(reinterpret_cast<const float*>(ranks_ + kRanks)),
          values_(boundaries_ + kLevels) {}

    // Any value for NaN.
    LSQ_INLINE float nearest(float x) const {
        const uint32_t rank = ranks_[bits_of(x) >> 16];
        return values_[rank + (x > boundaries_[rank] ? 1 : 0)];
    }

private:
    static constexpr int64_t kRanks = 65536 + 64, kLevels = 256;

    const uint8_t* ranks_;
    const float *boundaries_, *values_;
};

// x within [-most, most], NaN as it is.
LSQ_INLINE float within(float x, float most) {
    const float low = x < -most ? -most : x;
    return low > most ? most : low;
}

LSQ_INLINE float finite(float x) { return poisoned(x, !(x < infinity())); }

// A scale as it is read back.
LSQ_INLINE float stored_scale(float scale, int64_t stored) {
    if (stored == kFloat32) return scale;
    if (!(scale < infinity())) return not_a_number();
    const uint32_t bits = bits_of(scale);
    if (stored == kBfloat16) return float_of((bits + 0x7FFFu + (bits >> 16 & 1u)) & 0xFFFF0000u);
    if (!(scale > 0.0f)) return float_of(0x00800000u);      // 2^-126
    if (bits <= 0x00400000u) return float_of(0x00400000u);  // 2^-127
    const uint32_t above = (bits + 0x007FFFFFu) & 0x7F800000u;
    return float_of(above < 0x7F000000u ? above : 0x7F000000u);  // up to 2^127
}

// The blocks of a FakeQuantize that share a scale each.
class Blocks {
public:
    // largest [down, across]: bits of the largest magnitudes; tops: those of rows of blocks or of
    // all, for scales that are multiples of one that no clip gives.
    LSQ_INLINE Blocks(const FakeQuantize& op, const uint32_t* largest, const uint32_t* tops)
        : clip(op.clip), columns(op.columns), height(op.block_rows), width(op.block_columns),
          across((op.columns + op.block_columns - 1) / op.block_columns), stored_(op.stored),
          largest_(largest), tops_(tops), given_(op.given), each_row_(op.each_row),
          clip_of_row_(op.clips > 1), one_clip_(op.clips == 1), value_(op.largest),
          multiple_(op.largest_multiplier), multipliers_(op.multipliers) {}

    LSQ_INLINE float clip_of(int64_t row) const {
        return clip ? clip[clip_of_row_ ? row : 0] : infinity();
    }

    // Scale of a block.
    LSQ_INLINE float scale(int64_t strip, int64_t block) const {
        const float most =
            given_ ? clip_of(strip) : finite(float_of(largest_[strip * across + block]));
        const float scale = most / value_;
        return stored_ == kMultiplied ? multiple(strip, scale) : stored_scale(scale, stored_);
    }

    const float* clip;
    int64_t columns, height, width, across;

private:
    // The nearest multiple of the scale that all share.
    LSQ_INLINE float multiple(int64_t strip, float scale) const {
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

// An element's row and block.
struct Position {
    int64_t row, column, strip, block, end;  // the end of the block's columns

    LSQ_INLINE Position(const Blocks& blocks, int64_t element)
        : row(element / blocks.columns), column(element - row * blocks.columns) {
        locate(blocks);
    }

    // Steps to the next element. -> whether that lies in another row or block
    LSQ_INLINE bool step(const Blocks& blocks) {
        if (++column < end) return false;
        if (column == blocks.columns) ++row, column = 0;
        locate(blocks);
        return true;
    }

private:
    LSQ_INLINE void locate(const Blocks& blocks) {
        strip = row / blocks.height;
        block = column / blocks.width;
        const int64_t past = (block + 1) * blocks.width;
        end = past < blocks.columns ? past : blocks.columns;
    }
};

constexpr int kThreads = 256;

// The first n of 8 values; 0 behind them.
LSQ_INLINE void load_first(const Float* from, int64_t n, float (&x)[kVector]) {
#if WHOLE
    load8(from, x);
#else
#pragma unroll
    for (int i = 0; i < kVector; ++i) x[i] = i < n ? widen(from[i]) : 0.0f;
#endif
}

LSQ_INLINE void store_first(Float* to, int64_t n, const float (&x)[kVector]) {
#if WHOLE
    store8(to, x);
#else
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
        if (i < n) to[i] = narrow<Float>(x[i]);
    }
#endif
}

// Maximum of each thread's number at its index, unless that is below 0. All threads of the warp
// must call this.
LSQ_INLINE void count_largest(uint32_t* numbers, int64_t index, uint32_t number) {
    const uint32_t low = static_cast<uint32_t>(index);  // indices of a warp lie near each other
    if (__all_sync(kAllLanes, low == __shfl_sync(kAllLanes, low, 0))) {
        number = warp_reduce<Largest>(number);
        if (threadIdx.x % kWarp != 0) return;
    }
    if (index >= 0) atomicMax(numbers + index, number);
}

}  // namespace

// Largest magnitudes within the clip, as bits: largest [down, across] of each block, tops of each
// row of blocks or of all. Either may be null, and is zeroed before.
LSQ_KERNEL __launch_bounds__(kThreads)
    lsq_largest_magnitudes(const FakeQuantize op, Out<uint32_t> largest, Out<uint32_t> tops) {
    wait_for_launches();
    const Float* from = op.x;
    uint32_t *of_blocks = largest, *of_all = tops;
    const Blocks blocks{op, nullptr, nullptr};
    if (op.given) {
        const int64_t strip = thread_of_grid<kThreads>();
        const bool inside = strip < op.clips;
        count_largest(of_all, inside ? (op.each_row ? strip : 0) : -1,
                      inside ? magnitude_of(blocks.clip[strip]) : 0);
        return;
    }
    const int64_t first = thread_of_grid<kThreads>() * kVector, left = op.rows * op.columns - first;
    float x[kVector] = {};
    if (left > 0) load_first(from + first, left, x);
    Position at{blocks, left > 0 ? first : 0};
    float most = blocks.clip_of(at.row);
    uint32_t highest = 0;
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
#if !WHOLE
        if (i >= left) continue;
        if (i > 0) {
            const int64_t index = at.strip * blocks.across + at.block, strip = at.strip;
            if (at.step(blocks)) {
                atomicMax(of_blocks + index, highest);
                if (of_all) atomicMax(of_all + (op.each_row ? strip : 0), highest);
                most = blocks.clip_of(at.row), highest = 0;
            }
        }
#endif
        const uint32_t bits = magnitude_of(most == most ? within(x[i], most) : most);
        highest = bits > highest ? bits : highest;
    }
    count_largest(of_blocks, left > 0 ? at.strip * blocks.across + at.block : -1, highest);
    if (of_all) count_largest(of_all, left > 0 ? (op.each_row ? at.strip : 0) : -1, highest);
}
LSQ_EXPORT(lsq_largest_magnitudes)

// largest, tops: from lsq_largest_magnitudes.
LSQ_KERNEL __launch_bounds__(kThreads)
    lsq_fake_quantize(const FakeQuantize op, In<uint32_t> largest, In<uint32_t> tops) {
    wait_for_launches();
    const int64_t first = thread_of_grid<kThreads>() * kVector, left = op.rows * op.columns - first;
    if (left <= 0) return;
    const Float* from = op.x;
    Float* out = op.out;
    uint8_t* clipped = op.clipped;
    const Blocks blocks{op, largest, tops};
    const Levels levels{op.levels};
    float x[kVector];
    load_first(from + first, left, x);
    Position at{blocks, first};
    float most = blocks.clip_of(at.row), scale = blocks.scale(at.strip, at.block);
    uint32_t outside = 0;
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
#if !WHOLE
        if (i >= left) continue;
        if (i > 0 && at.step(blocks))
            most = blocks.clip_of(at.row), scale = blocks.scale(at.strip, at.block);
#endif
        outside |= static_cast<uint32_t>(fabsf(x[i]) > most) << i;
        const float value =
            levels.nearest(scale == 0.0f ? 0.0f : within(x[i], most) / scale) * scale;
        x[i] = x[i] == x[i] ? value : x[i];
    }
    store_first(out + first, left, x);
    if (clipped) clipped[first / kVector] = static_cast<uint8_t>(outside);
}
LSQ_EXPORT(lsq_fake_quantize)

// A warp takes a row, and runs through it twice.
LSQ_KERNEL __launch_bounds__(kThreads) lsq_round_values_at_random(const RoundAtRandom op) {
    wait_for_launches();
    constexpr int kStep = kVector * kWarp, kRows = kThreads / kWarp;
    const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
    const int64_t columns = op.columns;
    const float q = op.largest;
    for (int64_t row = static_cast<int64_t>(blockIdx.x) * kRows + warp; row < op.rows;
         row += gridDim.x * kRows) {
        const Float* from = op.x + row * columns;
        Float* out = op.out + row * columns;
        uint32_t largest = 0;
        for (int64_t column = kVector * lane; column < columns; column += kStep) {
            float x[kVector];
            load_first(from + column, columns - column, x);
            largest = largest8(x, largest);
        }
        largest = warp_reduce<Largest>(largest);
        const GradientScale s = gradient_scale(float_of(largest), q);
        const uint32_t word = philox_word(op.key[0], op.subsequence, row);
        for (int64_t column = kVector * lane; column < columns; column += kStep) {
            float x[kVector];
            load_first(from + column, columns - column, x);
            const uint32_t first = word + static_cast<uint32_t>(column) * kWordStep;
            const uint2 codes = round8_at_random(x, s.reciprocal, first, q);
#pragma unroll
            for (int i = 0; i < kVector; ++i) {
                const uint32_t four = i < 4 ? codes.x : codes.y;
                x[i] = static_cast<float>(static_cast<int8_t>(four >> (8 * (i % 4)))) * s.scale;
            }
            store_first(out + column, columns - column, x);
        }
    }
}
LSQ_EXPORT(lsq_round_values_at_random)
