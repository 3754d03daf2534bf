// Kernels that multiply rows of codes with packed columns whose scales belong to groups; see
// grouped_product.cpp.
#pragma once

#include <optional>

#include "tiles.h"

namespace lsq {

// From the scale of one row to the next, and of one group to the next; 0 where they share it.
struct ScaleSteps {
    int64_t row, group;
};

inline int64_t grouped_block_bytes(int64_t group) { return kTilePair * (group + 8); }

// What lies behind the codes of a block.
struct GroupedBlock {
    const int32_t* starts;  // [32], -128 times the sum of a column
    const float* scale;     // [32]

    GroupedBlock(const int8_t* block, int64_t group)
        : starts(reinterpret_cast<const int32_t*>(block + kTilePair * group)),
          scale(reinterpret_cast<const float*>(starts + kTilePair)) {}
};

// Rows of codes `stride` apart, whole groups long, with their scales.
struct GroupedRows {
    const int8_t* data;
    int64_t stride, rows;
    const float* scale;
    ScaleSteps steps;
};

struct GroupedKernel {
    // sums [rows, 32], 32 apart, of the groups of a pair of tiles of columns.
    void (*multiply)(const GroupedRows& a, const int8_t* blocks, int64_t groups, int64_t group,
                     float* sums);
    int64_t rows;  // most at a time, at most 32
    uint8_t bias;  // that rows have added to their codes
    bool amx;
};

// The fastest that these instructions allow.
GroupedKernel grouped_kernel_of(Instructions instructions, int64_t group, bool few_rows);

// What a thread holds while it multiplies.
class GroupedSession {
public:
    explicit GroupedSession(const GroupedKernel& kernel) {
#if defined(LSQ_AMX)
        if (kernel.amx) tiles_.emplace();
#endif
    }

private:
#if defined(LSQ_AMX)
    std::optional<WholeTiles> tiles_;
#endif
};

}  // namespace lsq
