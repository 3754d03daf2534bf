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

// The codes of a product of KIND 0, else null: what StraightThrough reads.
__device__ __forceinline__ const int8_t* codes_of(const ProductValue* values) {
    return KIND == 0 ? reinterpret_cast<const int8_t*>(values) : nullptr;
}

// Eight values of columns [column, column + 8), as they were loaded.
__device__ __forceinline__ void unpack_product8(
    const Packed<ProductValue>& packed, const float* scale, int column, float (&x)[kVector]) {
#if KIND == 2
    unpack8(packed, x);
#else
    int32_t integers[kVector];
    unpack8(packed, integers);
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

// The same with the bias [N] added, where there is one.
__device__ __forceinline__ void read_biased8(
    const Packed<ProductValue>& packed, const float* scale, const float* bias, int column, float (&x)[kVector]) {
    unpack_product8(packed, scale, column, x);
    if (!bias) return;
    float added[kVector];
    load8(bias + column, added);
#pragma unroll
    for (int i = 0; i < kVector; ++i) x[i] += added[i];
}

// One value of column `column`.
__device__ __forceinline__ float read_product(ProductValue value, const float* scale, int64_t column) {
#if KIND == 2
    return widen(value);
#else
    return static_cast<float>(value) * scale[KIND == 0 ? 0 : column];
#endif
}

}  // namespace lsq
