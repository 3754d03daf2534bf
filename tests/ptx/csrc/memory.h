// Addresses, and who has touched which memory.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <unordered_map>
#include <utility>
#include <vector>

namespace ptx {

// Shared memory begins behind what the system takes of it.
constexpr uint32_t kSharedFirst = 1024;
// Generic addresses of shared and of a thread's own memory: none of the host's begins with these.
constexpr uint64_t kSharedWindow = 0x5a00ull << 48, kLocalWindow = 0x5b00ull << 48;

// Global memory that a launch may touch: [first, last), ascending, apart.
struct Allocations {
    std::vector<std::pair<uint64_t, uint64_t>> ranges;

    void add(uint64_t first, uint64_t bytes) { ranges.push_back({first, first + bytes}); }
    void sort();
    bool hold(uint64_t address, uint64_t bytes) const;
};

// Who touched a byte last. Clocks are of the thread's warp: see Warp::clock.
struct Touched {
    bool written = false;
    bool proxied = false;     // a fence showed it to the asynchronous proxy
    uint8_t copies = 0;       // of cp.async under way to it
    uint16_t readings = 0;    // groups of wgmma that read it
    int writer = -1;          // thread
    uint32_t written_at = 0;  // clock
};

struct SharedMemory {
    std::vector<uint8_t> bytes;
    std::vector<Touched> touched;
    // By byte and warp: clock << 8 | lane of the last read, kSeveral for several lanes.
    std::vector<uint32_t> read;
    static constexpr uint32_t kSeveral = 0xff;
};

// Clocks of blocks' warps: what somebody has seen of blocks. By block, then by warp.
using Knowledge = std::map<int, std::vector<uint32_t>>;
void join(Knowledge& into, const Knowledge& other);

// Fences are sequentially consistent (membar.gl): one of a thread that has passed a barrier since
// orders as the fence of the thread itself does.
struct SeenOfBlocks {
    Knowledge known;    // what accesses may rely on
    Knowledge pending;  // what atomic operations have found: a fence makes it known
    Knowledge fenced;   // what atomic operations publish: a fence has covered it

    void join(const SeenOfBlocks& other);
};

// Who wrote a byte of global memory last, in this launch.
struct Written {
    int block = -1, thread = 0;
    uint32_t clock = 0;
    bool atomic = false;
};

struct GlobalMemory {
    static constexpr uint64_t kPage = 256;
    std::unordered_map<uint64_t, std::array<Written, kPage>> pages;
    // Of a word that atomic operations change: what their threads had seen at their last fence.
    std::unordered_map<uint64_t, Knowledge> published;
};

}  // namespace ptx
