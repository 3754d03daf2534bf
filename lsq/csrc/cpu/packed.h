// Products of codes with a weight that was packed once; lsq/ops/packed_weight.py packs it.
#pragma once

#include "int4_tiles.h"
#include "rows.h"
#include "sparse_tiles.h"

namespace lsq {

// `x` has `rows` rows of as many codes as the weight has inputs.
inline TileProduct packed_product(const Coded& x, const PackedWeight& weight, int64_t rows) {
    return {{x.codes, weight.inner, 0},
            {nullptr, 0, 0},
            rows,
            weight.columns,
            weight.inner,
            static_cast<Instructions>(weight.instructions),
            0,
            reinterpret_cast<int8_t*>(weight.tiles)};
}

// Calls use(multiplier) with this thread's multiplier of the weight's format.
template <class Use>
void with_multiplier(const TileProduct& product, const PackedWeight& weight, const Use& use) {
    if (weight.bits == 4) {
        Int4Multiplier multiplier(product);
        use(multiplier);
    } else if (weight.sparse) {
        SparseMultiplier multiplier(product);
        use(multiplier);
    } else {
        StripMultiplier multiplier(product);
        use(multiplier);
    }
}

}  // namespace lsq
