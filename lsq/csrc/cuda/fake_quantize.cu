// Values of a number format instead of floats; lsq/ops/fake_quantize.py is the reference.
//
// A thread takes 8 values that lie one after another. -DWHOLE=1: those lie in one row, and in one
// block of values with a scale; 0: rows, blocks and the tensor may end among them.
#include "number_format.cuh"
#include "random.cuh"
#include "reduce.cuh"

#ifndef WHOLE
#define WHOLE 0
#endif

namespace {

constexpr int kThreads = 256;

__device__ __forceinline__ int64_t thread_of_grid() {
    return static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
}

__device__ __forceinline__ uint32_t magnitude_bits(float x) { return bits_of(x) & 0x7FFFFFFFu; }

// The first n of 8 values; 0 behind them.
__device__ __forceinline__ void load_first(const Float* from, int64_t n, float (&x)[kVector]) {
#if WHOLE
    load8(from, x);
#else
#pragma unroll
    for (int i = 0; i < kVector; ++i) x[i] = i < n ? widen(from[i]) : 0.0f;
#endif
}

__device__ __forceinline__ void store_first(Float* to, int64_t n, const float (&x)[kVector]) {
#if WHOLE
    store8(to, x);
#else
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
        if (i < n) to[i] = narrow<Float>(x[i]);
    }
#endif
}

// Lets a number of each thread, if its place is not below 0, count at that place. All threads of
// the warp must call this.
__device__ __forceinline__ void count_largest(uint32_t* numbers, int64_t place, uint32_t number) {
    const uint32_t low = static_cast<uint32_t>(place);  // places of a warp lie near each other
    if (__all_sync(kAllLanes, low == __shfl_sync(kAllLanes, low, 0))) {
        number = warp_reduce<Largest>(number);
        if (threadIdx.x % kWarp != 0) return;
    }
    if (place >= 0) atomicMax(numbers + place, number);
}

}  // namespace

// The largest magnitudes within the clip, as bits, which order alike; NaN is larger than infinity.
// largest [down, across], of each block; tops, of each row of blocks or of all: see
// number_format.cuh. Either may be null, and is zeroed before.
LSQ_KERNEL __launch_bounds__(kThreads)
    lsq_largest_magnitudes(const FakeQuantize op, Out<uint32_t> largest, Out<uint32_t> tops) {
    const Float* from = op.x;
    uint32_t *of_blocks = largest, *of_all = tops;
    const Blocks blocks{op, nullptr, nullptr};
    if (op.given) {
        const int64_t strip = thread_of_grid();
        const bool inside = strip < op.clips;
        count_largest(of_all, inside ? (op.each_row ? strip : 0) : -1,
                      inside ? magnitude_bits(blocks.clip[strip]) : 0);
        return;
    }
    const int64_t first = thread_of_grid() * kVector, left = op.rows * op.columns - first;
    float x[kVector] = {};
    if (left > 0) load_first(from + first, left, x);
    Place place{blocks, left > 0 ? first : 0};
    float most = blocks.clip_of(place.row);
    uint32_t found = 0;
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
#if !WHOLE
        if (i >= left) continue;
        if (i > 0) {
            const int64_t index = place.strip * blocks.across + place.block, strip = place.strip;
            if (place.step(blocks)) {
                atomicMax(of_blocks + index, found);
                if (of_all) atomicMax(of_all + (op.each_row ? strip : 0), found);
                most = blocks.clip_of(place.row), found = 0;
            }
        }
#endif
        const uint32_t bits = magnitude_bits(most == most ? within(x[i], most) : most);
        found = bits > found ? bits : found;
    }
    count_largest(of_blocks, left > 0 ? place.strip * blocks.across + place.block : -1, found);
    if (of_all) count_largest(of_all, left > 0 ? (op.each_row ? place.strip : 0) : -1, found);
}
LSQ_EXPORT(lsq_largest_magnitudes)

// largest, tops: what lsq_largest_magnitudes has found.
LSQ_KERNEL __launch_bounds__(kThreads)
    lsq_fake_quantize(const FakeQuantize op, In<uint32_t> largest, In<uint32_t> tops) {
    const int64_t first = thread_of_grid() * kVector, left = op.rows * op.columns - first;
    if (left <= 0) return;
    const Float* from = op.x;
    Float* out = op.out;
    uint8_t* clipped = op.clipped;
    const Blocks blocks{op, largest, tops};
    const Levels levels{op.levels};
    float x[kVector];
    load_first(from + first, left, x);
    Place place{blocks, first};
    float most = blocks.clip_of(place.row), scale = blocks.scale(place.strip, place.block);
    uint32_t outside = 0;
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
#if !WHOLE
        if (i >= left) continue;
        if (i > 0 && place.step(blocks))
            most = blocks.clip_of(place.row), scale = blocks.scale(place.strip, place.block);
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
#pragma unroll
            for (int i = 0; i < kVector; ++i)
                largest = Largest::join(largest, magnitude_bits(x[i]));
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
