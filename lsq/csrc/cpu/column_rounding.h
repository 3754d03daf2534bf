// Second operand of the product for the gradient of a weight: x [M, K] times the scales of rows,
// rounded per column at random; see lsq/ops/weight_gradient.py.
#pragma once

#include "aligned.h"
#include "structs.h"
#include "tiles.h"

namespace lsq {

class ColumnRounding {
public:
    // column_scale [K]: gets the scales of all columns, with the scale of x in it.
    ColumnRounding(const ProjectWeightGradient& op, float* column_scale);

    // Codes [M, K].
    void to_rows(int8_t* rounded) const;

    // Codes as b of this product, packed.
    void to_tiles(const TileProduct& product) const;

private:
    float factor(int64_t row) const;
    void round_tiles(int64_t first, int64_t column, const uint32_t* words, int8_t* to,
                     int64_t distance) const;

    const ProjectWeightGradient& op_;
    Aligned<float> reciprocal_;  // [K] and zeros up to a multiple of 64
    bool poisoned_;              // a row scale is not finite: every code is 0, every scale NaN
};

}  // namespace lsq
