// Packs weights to fields, and hands rows and tiles of outputs to the kernels that multiply them.
#include "fields.h"

#include <cmath>

#include "floats.h"
#include "packed.h"
#include "tile_reader.h"

namespace lsq {

namespace {

FieldMemory& kept() {
    static thread_local FieldMemory memory;
    return memory;
}

// Inputs of whole spans.
int64_t field_depth(const PackedWeight& weight) {
    return rounded_up(weight.inner, kCpuLayout.unit * (weight.bits % 2 ? 8 : 4));
}

FieldColumns columns_of(const PackedWeight& weight) {
    const int64_t depth = field_depth(weight), group = weight.group ? weight.group : depth;
    const int64_t distance = kCpuLayout.outputs * depth * weight.bits / 8;
    const uint8_t* behind = weight.tiles + rounded_up(weight.columns, kCpuLayout.pad) /
                                               kCpuLayout.outputs * distance;
    return {weight.tiles,
            distance,
            weight.group ? reinterpret_cast<const float*>(behind) : nullptr,
            weight.scales,
            weight.scales > 1 ? kCpuLayout.outputs : 0,
            (depth + group - 1) / group,
            group,
            depth};
}

}  // namespace

template <class Sum>
FieldMultiplier<Sum>::FieldMultiplier(const PackedWeight& weight, const int8_t* x,
                                      const float* scale, ScaleSteps steps)
    : weight_(weight), x_(x), scale_(scale), steps_(steps),
      code_{weight.bits, static_cast<int32_t>(weight.step), static_cast<int32_t>(weight.zero),
            weight.table, weight.words != 0, weight.registers},
      columns_(columns_of(weight)), chosen_{}, a_{},
      session_(static_cast<Instructions>(weight.instructions)) {}

template <class Sum>
void FieldMultiplier<Sum>::take(int64_t first, int64_t count) {
    const int64_t inner = weight_.inner, groups = columns_.groups;
    chosen_ = field_kernel(code_, static_cast<Instructions>(weight_.instructions), count,
                           weight_.group);
    const int64_t depth =
        chosen_.padded ? rounded_up(columns_.depth, kTileInner) : columns_.depth;
    const int64_t height = chosen_.padded ? rounded_up(count, kTileSide) : count;
    const int8_t* from = x_ + first * inner;
    a_ = {from, inner, count, nullptr, scale_ + first * steps_.row, steps_};
    const bool reads_on = chosen_.padded && weight_.group % kTileInner;
    if (inner != depth || height != count || reads_on) {
        int8_t* rows = kept().rows.at_least(height * depth + kTileInner);
        for (int64_t row = 0; row < count; ++row) {
            std::memcpy(rows + row * depth, from + row * inner, inner);
            std::memset(rows + row * depth + inner, 0, depth - inner);
        }
        a_.data = rows, a_.stride = depth;
    }
    if (chosen_.wide) widen(count, depth);
    int32_t* sums = kept().sums.at_least(count * groups);
    a_.sums = sums;
    for (int64_t row = 0; row < count; ++row) {
        for (int64_t g = 0; g < groups; ++g) {
            const int8_t* codes = from + row * inner + g * columns_.group;
            const int64_t there = std::min(columns_.group, inner - g * columns_.group);
            int32_t sum = 0;
#pragma omp simd reduction(+ : sum)
            for (int64_t i = 0; i < there; ++i) sum += codes[i];
            *sums++ = sum;
        }
    }
}

template <class Sum>
void FieldMultiplier<Sum>::widen(int64_t count, int64_t depth) {
    int16_t* wide = kept().wide.at_least(count * depth);
    for (int64_t row = 0; row < count; ++row) {
        const int8_t* codes = a_.data + row * a_.stride;
        int16_t* to = wide + row * depth;
        for (int64_t i = 0; i < depth; i += 4) {
            to[i] = codes[i], to[i + 1] = codes[i + 2];
            to[i + 2] = codes[i + 1], to[i + 3] = codes[i + 3];
        }
    }
    a_.data = reinterpret_cast<int8_t*>(wide), a_.stride = depth * sizeof(int16_t);
}

template <class Sum>
void FieldMultiplier<Sum>::multiply(int64_t begin, int64_t end, Sum* sums, int64_t stride) const {
    FieldColumns b = columns_;
    const int64_t tile = begin / kTileSide, scales = b.scales * kTileSide;
    b.data += tile * b.distance;
    if (b.scale) b.scale += tile * scales;
    for (int64_t column = begin; column < end; column += kTilePair, sums += kTilePair) {
        chosen_.kernel(a_, b, code_, kept(), sums, stride);
        b.data += 2 * b.distance;
        if (b.scale) b.scale += 2 * scales;
    }
}

template class FieldMultiplier<int32_t>;
template class FieldMultiplier<float>;

}  // namespace lsq

using namespace lsq;

namespace {

// Sets the vectors of `units` units, 64 bytes each, of codes of `bits` bits.
void pack_span(const uint8_t* codes, int64_t units, int64_t bits, uint8_t* to) {
    int64_t low = 0;
    for (int64_t width : {8, 4, 2, 1}) {
        if (!(bits & width)) continue;
        const int64_t places = 8 / width;
        const int mask = (1 << width) - 1;
        for (int64_t unit = 0; unit < units; ++unit) {
            const int64_t place = unit % places;
            uint8_t* vector = to + unit / places * kCpuLayout.vector;
            const uint8_t* from = codes + unit * kCpuLayout.vector;
#pragma omp simd
            for (int64_t i = 0; i < kCpuLayout.vector; ++i) {
                const int field = (from[i] >> low & mask) << place * width;
                vector[i] = static_cast<uint8_t>(place ? vector[i] | field : field);
            }
        }
        to += units / places * kCpuLayout.vector;
        low += width;
    }
}

}  // namespace

// Packs stored codes [P, K] and, where weight.group is not 0, their scales.
LSQ_EXPORT void lsq_pack_fields(const GroupedCodes& codes, const PackedWeight& weight) {
    const FieldColumns b = columns_of(weight);
    const int64_t units = weight.bits % 2 ? 8 : 4, columns = weight.columns;
    const int64_t span = units * kCpuLayout.unit, vectors = units * weight.bits / 8;
    const Codes matrix{codes.codes, codes.columns, 0};
#pragma omp parallel for schedule(static)
    for (int64_t first = 0; first < columns; first += kTileGroup) {
        const int64_t rows = std::min(kTileGroup, columns - first);
        const int64_t tiles = rounded_up(rows, kTilePair) / kTileSide;
        const int64_t distance = inner_tiles(weight.inner) * kTileBytes;
        int8_t* unpacked = kept().rows.at_least(kTileGroup / kTileSide * distance);
        TileReader(matrix, weight.inner)
            .units(first, rows, unpacked, distance, [](int64_t, const int8_t*) {});
        for (int64_t i = 0; i < tiles; ++i) {
            const int64_t tile = first / kTileSide + i;
            uint8_t* to = const_cast<uint8_t*>(b.data) + tile * b.distance;
            const auto* from = reinterpret_cast<const uint8_t*>(unpacked + i * distance);
            for (int64_t k = 0; k < b.depth; k += span) {
                pack_span(from + k * kTileSide, units, weight.bits, to);
                to += vectors * kCpuLayout.vector;
            }
            if (!b.scale) continue;
            float* scale = const_cast<float*>(b.scale) + tile * b.scales * kTileSide;
            for (int64_t g = 0; g < b.scales; ++g) {
                for (int64_t lane = 0; lane < kTileSide; ++lane) {
                    const int64_t row = codes.scale_rows > 1 ? tile * kTileSide + lane : 0;
                    const int64_t group = codes.scale_columns > 1 ? g : 0;
                    *scale++ = tile * kTileSide + lane < columns
                                   ? codes.scale[row * codes.scale_columns + group]
                                   : 0.0f;
                }
            }
        }
    }
}

namespace {

constexpr int64_t kStrip = 128;  // rows for which codes are unpacked

// x [n] as whole numbers of 16 bits: x / scale = 256 * high + low. -> scale; NaN if one is not
// finite
float split_row(const float* x, int64_t n, int8_t* high, int8_t* low) {
    constexpr float kMost = 127 * 257;
    const float most = largest_magnitude(x, n), scale = most / kMost;
    if (!(most < infinity())) {
        std::memset(high, 0, n), std::memset(low, 0, n);
        return not_a_number();
    }
    const float steps = scale > 0.0f ? 1.0f / scale : 0.0f;
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) {
        const int32_t whole = static_cast<int32_t>(std::nearbyint(x[i] * steps));
        const int32_t upper = (whole + 128) >> 8;
        high[i] = static_cast<int8_t>(upper), low[i] = static_cast<int8_t>(whole - upper * 256);
    }
    return scale;
}

}  // namespace

// A projection of floats without its epilogue: each row becomes two rows of codes, whose exact
// products are added.
LSQ_EXPORT void lsq_multiply_floats(const Project& op, const PackedWeight& weight) {
    const int64_t n = weight.inner;
    Aligned<int8_t> codes(2 * op.rows * n);
    Aligned<float> scale(2 * op.rows);
#pragma omp parallel for schedule(static)
    for (int64_t row = 0; row < op.rows; ++row) {
        int8_t* to = codes.data() + 2 * row * n;
        const float unit = split_row(op.x.floats + row * n, n, to, to + n);
        scale[2 * row] = 256.0f * unit, scale[2 * row + 1] = unit;
    }
    const auto add = [&](int64_t first, int64_t rows, int64_t begin, int64_t count,
                         const float* sums, int64_t stride) {
        for (int64_t row = first / 2; row < (first + rows) / 2; ++row, sums += 2 * stride) {
            float* out = op.out + row * op.columns + begin;
#pragma omp simd
            for (int64_t i = 0; i < count; ++i) out[i] = sums[i] + sums[stride + i];
        }
    };
    multiply_columns<float>(2 * op.rows, weight.columns, kStrip, [&](const auto& use) {
        FieldMultiplier<float> multiplier(weight, codes.data(), scale.data(), {1, 0});
        use(multiplier, add);
    });
}

// A projection of groups of codes without its epilogue: floats in op.out.
LSQ_EXPORT void lsq_multiply_groups(const Project& op, const PackedWeight& weight) {
    const GroupedCodes& x = op.groups;
    const ScaleSteps steps{x.scale_rows > 1 ? x.scale_columns : 0, x.scale_columns > 1};
    const auto copy = [&](int64_t first, int64_t rows, int64_t begin, int64_t n, const float* sums,
                          int64_t stride) {
        for (int64_t row = first; row < first + rows; ++row, sums += stride)
            std::memcpy(op.out + row * op.columns + begin, sums, n * sizeof(float));
    };
    multiply_columns<float>(op.rows, weight.columns, kStrip, [&](const auto& use) {
        FieldMultiplier<float> multiplier(weight, x.codes, x.scale, steps);
        use(multiplier, copy);
    });
}
