// The order in which blocks, warps and the lanes of a warp run.
#pragma once

#include <algorithm>
#include <cstddef>
#include <numeric>
#include <random>
#include <vector>

namespace emulator {

// Positions 0 to count - 1 in the chosen order (scheduler.h), shuffled anew by each call where that is random.
class Order {
public:
    explicit Order(int order) : order_(order), generator_(static_cast<unsigned>(order)) {}

    void arrange(std::vector<unsigned>& positions, size_t count) {
        positions.resize(count);
        std::iota(positions.begin(), positions.end(), 0u);
        if (order_ == 1) std::reverse(positions.begin(), positions.end());
        if (order_ != 0 && order_ != 1) std::shuffle(positions.begin(), positions.end(), generator_);
    }

private:
    int order_;
    std::minstd_rand generator_;
};

}  // namespace emulator
