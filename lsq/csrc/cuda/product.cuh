// An int8 product, a [M, K] times b [N, K] transposed, up to its sums in registers: `accumulate`,
// by wgmma or mma.sync. Epilogues (product_rows.cuh) know a block's warps and their sums.
#pragma once

#if WGMMA
#include "product_wgmma.cuh"
#else
#include "product_mma.cuh"
#endif
