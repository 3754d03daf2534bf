// Kernels that multiply packed tiles with the instructions of a processor.
#pragma once

#include "tiles.h"

namespace lsq {

// Two tiles of `b` side by side, `distance` bytes apart, for `depth` tiles along K.
struct PairOfColumns {
    const int8_t* data;
    int64_t distance, depth;
    const int32_t* sums;  // [32], 128 times the sum of each column of all of b; null: add to the sums that stand there
    int64_t ahead;        // what lies so many bytes behind is needed next, and fetched; 0: nothing
};

// sums [32, 32] of the first two tiles of rows, `stride` apart. Those of the first `rows` count; the others may be missing.
using Kernel = void (*)(const TileRows& a, const PairOfColumns& b, int32_t* sums, int64_t stride, int64_t rows);

Kernel kernel_of(Instructions instructions);

// Whether `a` is handed over with 128 added to each element, which the instructions take as unsigned.
inline bool biased(Instructions instructions) {
    return instructions == Instructions::avx_vnni || instructions == Instructions::avx512_vnni;
}

}  // namespace lsq
