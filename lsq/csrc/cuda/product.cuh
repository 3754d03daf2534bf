// An int8 product, a [M, K] times b [N, K] transposed, up to its sums in registers: `accumulate`,
// by the instruction that -D names. What follows it (product_rows.cuh, product_split.cuh) knows of
// either how many warps a block has, and which sums.
#pragma once

#ifndef WGMMA
#define WGMMA 0
#endif
#if WGMMA
#include "product_wgmma.cuh"
#else
#include "product_mma.cuh"
#endif
