// Memory accesses, and what is wrong with them.
#include "memory.h"

#include <algorithm>

#include "machine.h"

namespace ptx {

void Allocations::sort() {
    std::sort(ranges.begin(), ranges.end());
    std::vector<std::pair<uint64_t, uint64_t>> apart;
    for (const auto& range : ranges) {
        if (!apart.empty() && range.first < apart.back().second)
            apart.back().second = std::max(apart.back().second, range.second);
        else
            apart.push_back(range);
    }
    ranges = apart;
}

bool Allocations::hold(uint64_t address, uint64_t bytes) const {
    auto after =
        std::upper_bound(ranges.begin(), ranges.end(), std::make_pair(address, UINT64_MAX));
    return after != ranges.begin() && address + bytes <= (--after)->second;
}

namespace {

std::string hexadecimal(uint64_t address) {
    char text[24];
    std::snprintf(text, sizeof text, "0x%llx", static_cast<unsigned long long>(address));
    return text;
}

// Whether what a thread did when its warp's clock was `clock` lies before what `thread` does now.
bool before(const Block& block, int other, uint32_t clock, const Thread& thread) {
    if (other == thread.number) return true;
    const Warp& from = *block.threads[other].warp;
    const uint32_t seen = thread.warp->clock[from.number];
    return &from == thread.warp ? clock < seen : clock <= seen;
}

// Checks and notes an access to shared memory at `offset` from its beginning.
void touch(Thread& thread, const Instruction& at, uint32_t offset, int bytes, Access access) {
    Block& block = *thread.block;
    const size_t warps = block.warps.size(), warp = thread.warp->number;
    const auto lane = static_cast<uint32_t>(thread.lane);
    const std::vector<uint32_t>& seen = thread.warp->clock;
    for (uint32_t byte = offset; byte < offset + bytes; ++byte) {
        Touched& one = block.shared.touched[byte];
        uint32_t* read = &block.shared.read[byte * warps];
        const auto wrong = [&](const std::string& what) {
            fault(thread, at, "shared memory at " + std::to_string(byte) + ": " + what);
        };
        if (one.copies) wrong("cp.async to it has not been waited for");
        if (access == Access::READ && !one.written) wrong("read, but nobody has written it");
        if (one.written && !before(block, one.writer, one.written_at, thread))
            wrong("thread " + std::to_string(one.writer) +
                  " wrote it, and no barrier lies between");
        if (access != Access::WRITE) {
            const bool again = read[warp] >> 8 == seen[warp] && (read[warp] & 255) != lane;
            read[warp] = seen[warp] << 8 | (again ? SharedMemory::kSeveral : lane);
        }
        if (access == Access::READ) continue;
        if (one.readings) wrong("wgmma still reads it");
        for (size_t other = 0; other < warps; ++other) {
            const uint32_t clock = read[other] >> 8;
            const bool ordered = other != warp ? clock <= seen[other]
                                               : clock < seen[other] || (read[other] & 255) == lane;
            if (!ordered)
                wrong("warp " + std::to_string(other) + " read it, and no barrier lies between");
        }
        one.written = true, one.proxied = false;
        one.writer = thread.number, one.written_at = seen[warp];
    }
    if (access != Access::READ && block.kernel.fences)
        thread.unfenced.push_back({offset, offset + bytes});
}

// Whether a write lies before what `thread` does now.
bool before(const Written& write, const Thread& thread) {
    const Block& block = *thread.block;
    if (write.block == block.number) return before(block, write.thread, write.clock, thread);
    const Knowledge& known = thread.warp->blocks.known;
    const auto seen = known.find(write.block);
    return seen != known.end() && write.clock <= seen->second[write.thread / kWarp];
}

// Checks and notes an access to global memory. Atomic operations publish what a fence before them
// covers, and a fence after them makes known what others have published.
void touch_global(Thread& thread, const Instruction& at, uint64_t address, int bytes, Access access,
                  const void* value) {
    GlobalMemory& memory = *thread.block->launch.memory;
    const uint64_t page = address / GlobalMemory::kPage;
    auto found = memory.pages.find(page);
    if (access == Access::READ && found == memory.pages.end()) return;
    if (found == memory.pages.end()) found = memory.pages.try_emplace(page).first;
    Warp& warp = *thread.warp;
    const bool atomic = access == Access::UPDATE;
    for (uint64_t byte = address; byte < address + bytes; ++byte) {
        Written& one = found->second[byte % GlobalMemory::kPage];
        const bool both = atomic && one.atomic;
        if (one.block >= 0 && !both && !before(one, thread)) {
            const auto* now = reinterpret_cast<const uint8_t*>(byte);
            const bool same = value && *now == static_cast<const uint8_t*>(value)[byte - address];
            if (!same)
                fault(thread, at,
                      "global memory: thread " + std::to_string(one.thread) + " of block " +
                          std::to_string(one.block) + " wrote it, and nothing orders that before");
        }
        if (access != Access::READ)
            one = {thread.block->number, thread.number, warp.clock[warp.number], atomic};
    }
    if (!atomic) return;
    Knowledge& published = memory.published[address];
    join(warp.blocks.pending, published);
    join(published, warp.blocks.fenced);
}

}  // namespace

void join(Knowledge& into, const Knowledge& other) {
    for (const auto& [block, clocks] : other) {
        std::vector<uint32_t>& seen = into[block];
        seen.resize(clocks.size());
        for (size_t warp = 0; warp < clocks.size(); ++warp)
            seen[warp] = std::max(seen[warp], clocks[warp]);
    }
}

void SeenOfBlocks::join(const SeenOfBlocks& other) {
    ptx::join(known, other.known);
    ptx::join(pending, other.pending);
    ptx::join(fenced, other.fenced);
}

void fence_memory(Thread& thread, const Instruction&) {
    Warp& warp = *thread.warp;
    join(warp.blocks.known, warp.blocks.pending);
    join(warp.blocks.fenced, warp.blocks.known);
    join(warp.blocks.fenced, {{thread.block->number, warp.clock}});
    ++warp.clock[warp.number];
}

void check_global_read(Thread& thread, const Instruction& at, uint64_t address, int bytes) {
    if (!thread.block->launch.allocations->hold(address, bytes))
        fault(thread, at, hexadecimal(address) + " lies outside every tensor of the launch");
    touch_global(thread, at, address, bytes, Access::READ, nullptr);
}

uint8_t* reach(Thread& thread, const Instruction& at, Space space, uint64_t address, int bytes,
               Access access, const void* value) {
    Block& block = *thread.block;
    if (address % bytes)
        fault(thread, at, hexadecimal(address) + " is no multiple of " + std::to_string(bytes));
    const bool generic = space == Space::GENERIC;
    const uint64_t window = address >> 48 << 48;
    if (generic && window == kSharedWindow) space = Space::SHARED, address -= kSharedWindow;
    if (generic && window == kLocalWindow) space = Space::LOCAL, address -= kLocalWindow;
    if (space == Space::SHARED) {
        const uint64_t offset = address - kSharedFirst;
        if (address < kSharedFirst || offset + bytes > block.shared.bytes.size())
            fault(thread, at,
                  "shared memory at " + std::to_string(offset) + ": the block has " +
                      std::to_string(block.shared.bytes.size()) + " bytes");
        touch(thread, at, static_cast<uint32_t>(offset), bytes, access);
        return &block.shared.bytes[offset];
    }
    if (space == Space::LOCAL) {
        if (address + bytes > thread.local.size()) fault(thread, at, "outside local memory");
        return &thread.local[address];
    }
    if (space == Space::PARAM) {
        if (address + bytes > block.kernel.parameter_bytes || access != Access::READ)
            fault(thread, at, "outside the parameters");
        return const_cast<uint8_t*>(block.launch.parameters) + address;
    }
    if (!block.launch.allocations->hold(address, bytes))
        fault(thread, at, hexadecimal(address) + " lies outside every tensor of the launch");
    touch_global(thread, at, address, bytes, access, value);
    return reinterpret_cast<uint8_t*>(address);
}

// cp.async: the thread may neither read nor write what it copies to until it has waited.
void begin(Thread& thread, const Instruction& at, Copy copy) {
    touch(thread, at, copy.to, copy.bytes, Access::WRITE);
    for (uint32_t i = 0; i < copy.bytes; ++i) ++thread.block->shared.touched[copy.to + i].copies;
    thread.copies.push_back(copy);
}

// The thread has waited for copies: it wrote their bytes.
void complete(Thread& thread, const Instruction& at, const std::vector<Copy>& copies) {
    SharedMemory& shared = thread.block->shared;
    for (const Copy& copy : copies) {
        for (uint32_t i = 0; i < copy.bytes; ++i) --shared.touched[copy.to + i].copies;
        touch(thread, at, copy.to, copy.bytes, Access::WRITE);
        if (copy.wanted) std::memcpy(&shared.bytes[copy.to], copy.from, copy.wanted);
        std::memset(&shared.bytes[copy.to] + copy.wanted, 0, copy.bytes - copy.wanted);
    }
}

}  // namespace ptx
