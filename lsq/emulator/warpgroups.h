// Multiplications that go on beside the warps that began them (wgmma), until these wait for them.
#pragma once

#include <string>

namespace emulator {

// The multiplications of the block that runs while it lives; those that are still under way in the end are abandoned.
class BlockMultiplications {
public:
    BlockMultiplications() = default;
    ~BlockMultiplications();
    BlockMultiplications(const BlockMultiplications&) = delete;
    BlockMultiplications& operator=(const BlockMultiplications&) = delete;
};

// Which threads of a warpgroup have not begun the same multiplications as its first one, in words; empty if all have.
std::string different_multiplications(unsigned threads);

}  // namespace emulator
