// A product as the next operation reads it. KIND: 0 codes with scale [1], 1 sums with scale [N], 2 Float.
#pragma once

#include "vectors.cuh"

#ifndef KIND
#define KIND 2
#endif

namespace lsq {

template <int kind>
struct ProductType;
template <>
struct ProductType<0> {
    using type = int8_t;
};
template <>
struct ProductType<1> {
    using type = int32_t;
};
template <>
struct ProductType<2> {
    using type = Float;
};
using ProductValue = ProductType<KIND>::type;

// Values [column, column + 8) of the row that begins at `element`.
__device__ __forceinline__ void read_product8(
    const ProductValue* values, const float* scale, int64_t element, int column, float (&x)[kVector]) {
#if KIND == 2
    load8(values + element + column, x);
#else
    int32_t integers[kVector];
    load8(values + element + column, integers);
#if KIND == 0
    const float step = scale[0];
#pragma unroll
    for (int i = 0; i < kVector; ++i) x[i] = static_cast<float>(integers[i]) * step;
#else
    float steps[kVector];
    load8(scale + column, steps);
#pragma unroll
    for (int i = 0; i < kVector; ++i) x[i] = static_cast<float>(integers[i]) * steps[i];
#endif
#endif
}

}  // namespace lsq
