// Products of int8 rows with weights of packed fields (lsq/quant/layouts.py has their order).
//
// Sums over k of x[m, k] * (step * code[n, k] - zero), or of (table[code] - zero). For few rows
// fields are multiplied where they stand in a byte, and the sums are shifted once. For more rows,
// and for tables, codes are unpacked to bytes. Weights are unsigned, so VNNI takes x as it is.
#pragma once

#include "rows.h"
#include "tiles.h"

namespace lsq {

// Strides of scales by row and by group; 0 where they share it.
struct ScaleSteps {
    int64_t row, group;
};

// Rows of x, whole spans long.
struct FieldRows {
    const int8_t* data;
    int64_t stride, count;
    const int32_t* sums;  // of the codes of each group, [count, groups]
    const float* scale;   // of floats
    ScaleSteps steps;

    FieldRows from(int64_t row, int64_t groups) const {
        return {data + row * stride,       stride, count - row, sums + row * groups,
                scale + row * steps.row, steps};
    }
};

// Two tiles of 16 outputs.
struct FieldColumns {
    const uint8_t* data;
    int64_t distance;      // bytes from tile to tile
    const float* scale;    // of both tiles, [2, scales, 16]; null: sums stay whole
    int64_t scales, step;  // of a tile: their number, and numbers from group to group
    int64_t groups, group, depth;  // inputs of a group; of all
};

// What a code stands for.
struct FieldCode {
    int64_t bits;
    int32_t step, zero;
    const uint8_t* table;  // the lower bytes of 16 whole numbers, then the upper ones; or null
    bool words;            // whether upper bytes count
    int64_t registers;     // rows up to which codes are multiplied in registers; -1: by the rule
};

// A thread's scratch memory.
struct FieldMemory {
    Kept<int8_t> rows;
    Kept<int16_t> wide;
    Kept<int32_t> sums;
    Kept<uint8_t> tiles;
};

// out [count, 32], `stride` apart: int32, or floats where columns have scales.
using FieldKernel = void (*)(const FieldRows& a, const FieldColumns& b, const FieldCode& code,
                             FieldMemory& memory, void* out, int64_t stride);

// The kernel for so many rows; `group`: inputs that share a scale, 0 for all. `padded`: x must have whole tiles of 64 inputs and of 16 rows, and
// memory behind them if groups are no whole tiles.
struct FieldChoice {
    FieldKernel kernel;
    bool padded;
    bool wide;  // x must be half-words: codes 0, 2, 1, 3 of each unit
};
FieldChoice field_kernel(const FieldCode& code, Instructions instructions, int64_t rows,
                         int64_t group);

// Multiplies rows of a product on one thread; see StripMultiplier. Sum: int32_t, or float with the
// scales of groups of x and of the weight.
template <class Sum>
class FieldMultiplier {
public:
    // x: `inner` codes a row; `scale` and `steps`: of x's groups.
    FieldMultiplier(const PackedWeight& weight, const int8_t* x, const float* scale,
                    ScaleSteps steps);
    FieldMultiplier(const FieldMultiplier&) = delete;
    FieldMultiplier& operator=(const FieldMultiplier&) = delete;

    void take(int64_t first, int64_t count);
    int64_t height() const { return rounded_up(a_.count, kTilePair); }
    void multiply(int64_t begin, int64_t end, Sum* sums, int64_t stride) const;

private:
    void widen(int64_t count, int64_t depth);

    const PackedWeight& weight_;
    const int8_t* x_;
    const float* scale_;
    ScaleSteps steps_;
    FieldCode code_;
    FieldColumns columns_;  // of the first outputs
    FieldChoice chosen_;
    FieldRows a_;
    TileSession session_;
};

}  // namespace lsq
