// Products whose epilogue reads strips of whole rows of sums in the cache, on all threads.
//
// A thread makes a reader by make() and calls reader(first row, rows, sums, elements between rows)
// -> a magnitude; the largest of all is the result. Strips begin at multiples of kTilePair rows.
#pragma once

#include <omp.h>

#include "../include/arithmetic.h"
#include "tiles.h"

namespace lsq {

// A sum over more products of codes than int32 holds, as a float.
struct LongSum {
    float value;
    operator float() const { return value; }
};

// Multiplies by packed b; the core that made a strip reads it.
template <class Make>
Magnitude multiply_packed(const TileProduct& product, const Make& make) {
    const int64_t strip = strip_rows(product, omp_get_max_threads());
    Magnitude found = 0;
#pragma omp parallel reduction(max : found)
    {
        auto reader = make();
        StripMultiplier multiplier(product);
#pragma omp for schedule(dynamic)
        for (int64_t first = 0; first < product.rows; first += strip) {
            const int64_t count = std::min(strip, product.rows - first);
            multiplier.take(first, count);
            found = std::max<Magnitude>(
                found, reader(first, count, multiplier.sums(), multiplier.stride()));
        }
    }
    return found;
}

// Packs b and multiplies.
template <class Make>
Magnitude multiply_rows(const TileProduct& product, const Make& make) {
    pack_columns(product);
    return multiply_packed(product, make);
}

// Reads rows [first, first + rows) of a product, `stride` elements apart.
template <class T, class Make>
Magnitude read_rows(const T* product, int64_t first, int64_t rows, int64_t stride,
                    const Make& make) {
    Magnitude found = 0;
#pragma omp parallel reduction(max : found)
    {
        auto reader = make();
#pragma omp for schedule(static)
        for (int64_t strip = first / kTilePair; strip <= (first + rows - 1) / kTilePair; ++strip) {
            const int64_t begin = std::max(first, strip * kTilePair);
            const int64_t end = std::min(first + rows, (strip + 1) * kTilePair);
            const auto* sums = product + (begin - first) * stride;
            found = std::max<Magnitude>(found, reader(begin, end - begin, sums, stride));
        }
    }
    return found;
}

}  // namespace lsq
