// Order of the device's work and last users of memory: finds uses that no event orders.
//
// A lane (a stream, a branch of a graph, or the host) does one piece of work after another, and has
// a vector clock: the number of pieces of every lane that are over when its next one begins. Memory
// is watched in granules of 16 bytes, the alignment of tensors, after watch(true), never under the
// sanitizers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace emulator {

using Clock = std::vector<uint32_t>;  // by number of the lane

// clock = max(clock, other).
void join(Clock& clock, const Clock& other);

struct Lane {
    Lane(std::string name, int device);
    std::string name;
    int device;
    uint32_t number;
    Clock clock;
};

constexpr int HOST = -1;  // in place of a device

// The host's lane; all later work comes after what it knows to be over.
Lane& host();

// Forgets earlier uses, and begins or ends to watch. False: impossible.
bool watch(bool on);

extern bool watching;

// Begins or ends work in a lane, which owns the accesses in between.
void begin_piece(Lane& lane, const std::string& what);
void end_piece();

// The current piece uses memory. -> its fault, in words after its name, or empty
std::string use(const void* address, size_t bytes, bool writes);

// Memory begins or ends in the order of a lane; its users must come between. `others`: lanes that
// the owner also waits for before it reuses the memory.
void begin_memory(Lane& lane, const std::string& name, const void* address, size_t bytes);
std::string end_memory(Lane& lane, const std::vector<Lane*>& others, const void* address);

}  // namespace emulator
