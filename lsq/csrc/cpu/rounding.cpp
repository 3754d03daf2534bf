// Rounds activations, weights and gradients; adds two gradients.
#include "floats.h"
#include "loops.h"
#include "weights.h"

using namespace lsq;

namespace {

constexpr int64_t kChunk = 2048;  // values that are rounded at a time

// Rounds elements [first, first + n) -> the largest magnitude.
Magnitude round_chunk(const Round& op, int64_t first, int64_t n) {
    const Border<const float> x(op.x, op.x_dtype);
#if defined(LSQ_WIDE)
    const Coded& to = op.rounded;
    const float clip = to.clip[0];
    if (WideClip::fits(clip) && !to.error) {
        const auto read = [&](int64_t i, __mmask16 there) {
            return load_sixteen(x, first + i, there);
        };
        return round_read(read, n, clip, clip / to.largest, to.codes + first,
                          to.clipped ? to.clipped + first / 8 : nullptr);
    }
#endif
    uint8_t outside[kChunk];
    float wide[kChunk];
    return round_row(op.rounded, first, n, lsq::read(x, first, n, wide), outside);
}

// Checksum of bytes and their order, run by run.
uint64_t checksum(const uint8_t* data, int64_t bytes) {
    constexpr int64_t kLanes = 16, kRun = 8 * kLanes * 512;
    constexpr uint64_t kFactor = 0x9E3779B97F4A7C15u;
    const int64_t runs = (bytes + kRun - 1) / kRun;
    uint64_t total = 0;
#pragma omp parallel for schedule(static) reduction(+ : total) if (runs > 8)
    for (int64_t run = 0; run < runs; ++run) {
        const int64_t first = run * kRun, count = std::min(kRun, bytes - first);
        uint64_t sums[kLanes] = {}, order[kLanes] = {};
        const auto add = [&](const uint8_t* from, int64_t size) {
            uint64_t words[kLanes] = {};
            std::memcpy(words, from, size);
#pragma omp simd
            for (int64_t j = 0; j < kLanes; ++j) order[j] += sums[j] += words[j];
        };
        const int64_t whole = count / (8 * kLanes) * (8 * kLanes);
        for (int64_t i = 0; i < whole; i += 8 * kLanes) add(data + first + i, 8 * kLanes);
        if (whole < count) add(data + first + whole, count - whole);
        uint64_t mixed = run + 1;
        for (int64_t j = 0; j < kLanes; ++j)
            mixed = ((mixed ^ sums[j]) * kFactor ^ order[j]) * kFactor;
        total += mixed ^ mixed >> 32;
    }
    return total;
}

}  // namespace

LSQ_OPERATION(Round, op) {
    const int64_t chunks = (op.count + kChunk - 1) / kChunk;
    Magnitude largest = 0;
#pragma omp parallel for schedule(static) reduction(max : largest)
    for (int64_t chunk = 0; chunk < chunks; ++chunk) {
        const int64_t first = chunk * kChunk;
        largest = std::max(largest, round_chunk(op, first, std::min(kChunk, op.count - first)));
    }
    finish(op.rounded, largest);
}

LSQ_EXPORT void lsq_round_int8(const RoundWeight& op) {
    if (op.weight.in_out) return round_in_out(op);
    round_weight(op,
                 [q = op.weight.largest](const float* values, int64_t n, float clip, float step,
                                         int8_t* codes) -> int {
#if defined(LSQ_WIDE)
                     if (WideClip::fits(clip))
                         return is_missing(round_under_clip(values, n, clip, step, codes, nullptr));
#endif
                     int missing = 0;
#pragma omp simd reduction(| : missing)
                     for (int64_t i = 0; i < n; ++i) {
                         const float ratio = values[i] / step;
                         missing |= ratio != ratio;
                         codes[i] = code_of(ratio, q);
                     }
                     return missing;
                 });
}

LSQ_OPERATION(RoundGradient, op) {
    const int64_t n = op.columns;
    const Blocks blocks(op.rows);
    GradientSink sink(blocks, n, nullptr, op.rounded, op.sum);
    for_blocks(blocks, n, [&](int64_t block, int64_t row, Scratch& scratch) {
        const Border<const float> gradient(op.gradient, op.gradient_dtype);
        float* scaled = scratch.a.data();
#if defined(LSQ_WIDE)
        const auto of_row = [&](int64_t i, __mmask16 there) {
            return load_sixteen(gradient, row * n + i, there);
        };
        sink.add_straight_through(block, row, Coded{}, of_row, scaled);
#else
        sink.add(block, row, read(gradient, row * n, n, scaled), scaled);
#endif
    });
    sink.finish();
}

LSQ_OPERATION(Add, op) {
    const float *a = op.a, *b = op.b;
    float* out = op.out;
#pragma omp parallel for simd schedule(static)
    for (int64_t i = 0; i < op.count; ++i) out[i] = a[i] + b[i];
}

// Checksums of `count` pieces of memory, each given by its address and its bytes.
LSQ_EXPORT void lsq_checksums(const int64_t* given, int64_t count, uint64_t* found) {
    for (int64_t i = 0; i < count; ++i) {
        const auto* data = reinterpret_cast<const uint8_t*>(given[2 * i]);
        found[i] = checksum(data, given[2 * i + 1]);
    }
}
