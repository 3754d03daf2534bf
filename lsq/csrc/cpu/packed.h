// Products of codes with a weight that was packed once; lsq/ops/packed_weight.py packs it.
#pragma once

#include <omp.h>

#include "fields.h"
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
    if (weight.step) {
        FieldMultiplier<int32_t> multiplier(weight, product.a.data, nullptr, {});
        use(multiplier);
    } else if (weight.bits == 4) {
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

constexpr int64_t kChunk = 256;  // outputs that a thread makes at a time

// Makes all sums of a product, `strip` rows at a time; threads share the outputs. make(use) calls
// use(multiplier, end) once on each; end(first row, rows, first output, n, sums, stride) takes
// sums.
template <class Sum, class Make>
void multiply_columns(int64_t rows, int64_t columns, int64_t strip, const Make& make) {
    const int64_t threads = omp_get_max_threads();
    const int64_t chunk =
        std::min(kChunk, rounded_up((columns + threads - 1) / threads, kTilePair));
#pragma omp parallel
    {
        static thread_local Kept<Sum> kept;
        make([&](auto& multiplier, auto&& end) {
            for (int64_t first = 0; first < rows; first += strip) {
                const int64_t count = std::min(strip, rows - first), stride = chunk + kTileSide;
                multiplier.take(first, count);
                Sum* sums = kept.at_least(multiplier.height() * stride);
#pragma omp for schedule(static) nowait
                for (int64_t begin = 0; begin < columns; begin += chunk) {
                    const int64_t n = std::min(chunk, columns - begin);
                    multiplier.multiply(begin, begin + rounded_up(n, kTilePair), sums, stride);
                    end(first, count, begin, n, sums, stride);
                }
            }
        });
    }
}

}  // namespace lsq
