// Which work of the device comes before which, and who touched which memory last: finds what no
// event orders.
//
// A lane does one piece of work after another: a stream, a branch of a graph, or the host. Each has
// a vector clock: how many pieces of every lane are over when its next one begins. Memory is
// watched in granules of 16 bytes, to which tensors are aligned; nothing is watched until
// watch(true), and nothing ever under the sanitizers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace emulator {

using Clock = std::vector<uint32_t>;  // by number of the lane

// Afterwards `clock` knows what `other` knows.
void join(Clock& clock, const Clock& other);

struct Lane {
    Lane(std::string name, int device);
    std::string name;
    int device;
    uint32_t number;
    Clock clock;
};

constexpr int HOST = -1;  // in place of a device

// The lane of the host; what it knows to be over is over for all work that is submitted later.
Lane& host();

// Forgets all that was touched, and begins or ends to watch. False where that cannot be.
bool watch(bool on);

extern bool watching;

// Work begins in a lane, or ends: the accesses in between are its own.
void begin_piece(Lane& lane, const std::string& what);
void end_piece();

// The piece that has begun touches memory. What is wrong with that in words that go on after its
// name, or nothing.
std::string use(const void* address, size_t bytes, bool writes);

// Memory begins or ends in the order of a lane: whoever uses it is ordered after the one and before
// the other. `others` are lanes whose work its owner waits for as well before the memory is used
// again.
void begin_memory(Lane& lane, const std::string& name, const void* address, size_t bytes);
std::string end_memory(Lane& lane, const std::vector<Lane*>& others, const void* address);

}  // namespace emulator
