// Copies to shared memory that go on beside the thread that began them (cp.async), until that thread waits for them.
#pragma once

namespace emulator {

// The copies of the block that runs while it lives; those that are still under way in the end are abandoned.
class BlockCopies {
public:
    BlockCopies() = default;
    ~BlockCopies();
    BlockCopies(const BlockCopies&) = delete;
    BlockCopies& operator=(const BlockCopies&) = delete;
};

}  // namespace emulator
