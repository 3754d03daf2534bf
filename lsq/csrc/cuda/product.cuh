// An int8 product, a [M, K] times b [N, K] transposed, up to sums in registers: `for_tiles`, by
// wgmma or mma.sync. Epilogues (product_rows.cuh) know a tile's warps and their sums.
//
// The kernel's file defines TRANSPOSED_ROWS if a is TransposedRows, and TRANSPOSED_COLUMNS if b is
// TransposedColumns; for_sums puts their rows and columns in order.
#pragma once

#if WGMMA
#include "product_wgmma.cuh"
#else
#include "product_mma.cuh"
#endif
#if TRANSPOSED_ROWS || TRANSPOSED_COLUMNS
#include "product_transposed.cuh"
#endif
