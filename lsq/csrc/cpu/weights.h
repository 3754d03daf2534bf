// Rounds and unpacks weights; lsq/quant/formats.py has the references. A format exports
// lsq_round_<name> and, if products cannot read it, lsq_unpack_<name>.
#pragma once

#include "aligned.h"
#include "floats.h"
#include "rows.h"
#include "tile_reader.h"

namespace lsq {

// The clip of row `row`, whose values are `line`.
inline float clip_of_row(const RoundWeight& op, int64_t row, const float* line) {
    const float before = op.weight.clip[op.clips > 1 ? row : 0];
    if (!op.new_clip) return before;
    return op.new_clip[row] = clip_of(bits_of(largest_magnitude(line, op.columns)), before);
}

// Calls round(values, n, clip, step, stored) -> whether a value was NaN, for each row; rows from
// `valid` on become zeros.
template <class Round>
void round_weight(const RoundWeight& op, const Round& round) {
    const Weight& weight = op.weight;
    const Border<const float> values(weight.values, weight.values_dtype);
    int missing_anywhere = 0;
#pragma omp parallel reduction(| : missing_anywhere)
    {
        Aligned<float> scratch(op.columns);
#pragma omp for schedule(static)
        for (int64_t row = 0; row < op.rows; ++row) {
            int8_t* stored = weight.codes + row * op.stored;
            if (row >= op.valid) {
                std::memset(stored, 0, op.stored);
                weight.scale[row] = 1.0f;
                continue;
            }
            const float* line = read(values, row * op.columns, op.columns, scratch.data());
            const float clip = clip_of_row(op, row, line), step = clip / weight.largest;
            const int missing = round(line, op.columns, clip, step, stored);
            weight.scale[row] = poisoned(step, missing);
            missing_anywhere |= missing;
        }
    }
    if (op.clips == 1 && missing_anywhere)
        std::fill(weight.scale, weight.scale + op.valid, not_a_number());
}

// Rounds values [K, N] by transposed blocks.
inline void round_in_out(const RoundWeight& op) {
    constexpr int64_t kSide = kTileGroup;
    const Weight& weight = op.weight;
    const Border<const float> from(weight.values, weight.values_dtype);
    const int64_t n = op.valid;
    const float q = weight.largest;
    int missing_anywhere = 0;
#pragma omp parallel for schedule(static) reduction(| : missing_anywhere)
    for (int64_t first = 0; first < n; first += kSide) {
        const int64_t rows = std::min(kSide, n - first);
        alignas(64) int8_t block[kSide][kSide];
        float steps[kSide], wide[kSide];
        int missing[kSide] = {};
        if (op.new_clip) {
            Magnitude largest[kSide] = {};
            for (int64_t i = 0; i < op.columns; ++i) {
                const float* values = read(from, i * n + first, rows, wide);
#pragma omp simd
                for (int64_t j = 0; j < rows; ++j) {
                    largest[j] =
                        magnitude_of(values[j]) > largest[j] ? magnitude_of(values[j]) : largest[j];
                }
            }
            for (int64_t j = 0; j < rows; ++j) {
                op.new_clip[first + j] = clip_of(largest[j], weight.clip[first + j]);
            }
        }
        const float* clip = op.new_clip ? op.new_clip : weight.clip;
        for (int64_t j = 0; j < rows; ++j) steps[j] = clip[op.clips > 1 ? first + j : 0] / q;
        for (int64_t begin = 0; begin < op.columns; begin += kSide) {
            const int64_t columns = std::min(kSide, op.columns - begin);
            for (int64_t i = 0; i < columns; ++i) {
                const float* values = read(from, (begin + i) * n + first, rows, wide);
#pragma omp simd
                for (int64_t j = 0; j < rows; ++j) {
                    const float ratio = values[j] / steps[j];
                    missing[j] |= ratio != ratio;
                    block[i][j] = code_of(ratio, q);
                }
            }
            UnitBlock transposed;
            alignas(64) int8_t tile[kTileSide][kTileInner];
            read_units({block[0], kSide, true}, 0, rows, 0, columns, transposed);
            for (int64_t j = 0; j < rows; ++j) {
                if (j % kTileSide == 0) {
                    transpose_units(transposed.bytes() + j / kTileSide * kTileInner, 4 * kTileGroup,
                                    tile[0]);
                }
                std::memcpy(weight.codes + (first + j) * op.stored + begin, tile[j % kTileSide],
                            columns);
            }
        }
        for (int64_t j = 0; j < rows; ++j) {
            weight.scale[first + j] = poisoned(steps[j], missing[j]);
            missing_anywhere |= missing[j];
        }
    }
    std::memset(weight.codes + n * op.stored, 0, (op.rows - n) * op.stored);
    std::fill(weight.scale + n, weight.scale + op.rows, 1.0f);
    if (op.clips == 1 && missing_anywhere)
        std::fill(weight.scale, weight.scale + n, not_a_number());
}

// Calls unpack(stored, n, codes) for each row.
template <class Unpack>
void unpack_weight(const UnpackWeight& op, const Unpack& unpack) {
#pragma omp parallel for schedule(static)
    for (int64_t row = 0; row < op.rows; ++row) {
        unpack(op.weight.codes + row * op.stored, op.columns, op.codes + row * op.columns);
    }
}

}  // namespace lsq
