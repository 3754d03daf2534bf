#include "counters.h"

#include <dlfcn.h>

#include <algorithm>
#include <cstring>
#include <initializer_list>
#include <string>
#include <unordered_map>
#include <vector>

namespace emulator {

bool profiling = false, counting = false;

namespace {

constexpr uintptr_t SECTOR = 32;  // bytes that a GPU moves between its caches at a time
constexpr size_t DEEPEST = 64;    // calls within calls that a path tells apart
constexpr unsigned BANKS = 32, WORD = 4;

struct Traffic {
    int64_t requests = 0, bytes = 0, sectors = 0;
    std::vector<bool> touched;  // sectors, each once
};

struct Region {
    uintptr_t begin = 0, end = 0;
    Traffic traffic[3];  // by Access
};

// Accesses to shared memory. A pass serves each bank once, and all lanes that want the same word of
// it.
struct Shared {
    int64_t requests = 0, passes = 0, least = 0;
};

// A basic block of the module, by its offset in it.
struct Block {
    uintptr_t offset = 0;
    int64_t warps = 0, lanes = 0;
    uint32_t seen[WARP] = {};
    bool active = false;
};

struct Record {
    std::string kernel, module;
    std::vector<Region> regions;  // the last one: memory that was not named
    Shared shared;
    std::vector<Block> blocks;
};

struct Request {
    uint32_t lanes = 0;
    uintptr_t address[WARP];
};

// An instruction, and its accesses by the running warp's lanes since they met.
struct Instruction {
    size_t size = 0;
    Access access = Access::read;
    uint32_t seen[WARP] = {};
    std::vector<Request> requests;
};

std::vector<Region> named;
std::vector<Record> records;
std::unordered_map<uint64_t, Instruction> sites;
std::vector<Instruction*> active_sites;
std::vector<uint32_t> block_at;  // by offset: index in the record's blocks, and one
std::vector<uint32_t> active_blocks;
uintptr_t module_begin;
struct {
    size_t depth;
    uint64_t hash[DEEPEST];
} paths[1024];
std::string text;

uint64_t& path() {
    auto& here = paths[current];
    return here.hash[std::min(here.depth, DEEPEST - 1)];
}

Region& region_of(uintptr_t address) {
    std::vector<Region>& regions = records.back().regions;
    for (Region& region : regions) {
        if (address - region.begin < region.end - region.begin) return region;
    }
    return regions.back();
}

std::string quoted(const std::string& words) { return '"' + words + '"'; }

std::string listed(std::initializer_list<int64_t> numbers) {
    std::string found = "[";
    for (const int64_t number : numbers)
        found += (found.size() > 1 ? "," : "") + std::to_string(number);
    return found + "]";
}

template <typename Items, typename Write>
std::string joined(const Items& items, const Write& write) {
    std::string found = "[";
    for (const auto& item : items) found += (found.size() > 1 ? "," : "") + write(item);
    return found + "]";
}

std::string written(const Region& region) {
    return joined(region.traffic, [](const Traffic& one) {
        const int64_t touched = std::count(one.touched.begin(), one.touched.end(), true);
        return listed({one.requests, one.bytes, one.sectors, touched});
    });
}

std::string written(const Record& record) {
    const Shared& shared = record.shared;
    return "{\"kernel\":" + quoted(record.kernel) + ",\"module\":" + quoted(record.module) +
           ",\"regions\":" +
           joined(record.regions, [](const Region& one) { return written(one); }) +
           ",\"shared\":" + listed({shared.requests, shared.passes, shared.least}) +
           ",\"blocks\":" +
           joined(record.blocks,
                  [](const Block& one) {
                      return listed({static_cast<int64_t>(one.offset), one.warps, one.lanes});
                  }) +
           "}";
}

template <typename Value>
size_t different(std::vector<Value>& values) {
    std::sort(values.begin(), values.end());
    values.erase(std::unique(values.begin(), values.end()), values.end());
    return values.size();
}

// Lanes are served together while they want at most a word of each bank: 32 of 4 bytes, 16 of 8, 8
// of 16.
void settle_shared(const Request& request, size_t size) {
    Shared& shared = records.back().shared;
    const unsigned together = std::max<size_t>(WARP * WORD / std::max<size_t>(size, WORD), 1);
    ++shared.requests;
    for (unsigned first = 0; first < WARP; first += together) {
        std::vector<uintptr_t> words[BANKS];
        bool any = false;
        for (unsigned lane = first; lane < first + together; ++lane) {
            if (!(request.lanes >> lane & 1)) continue;
            any = true;
            const uintptr_t last = (request.address[lane] + size - 1) / WORD;
            for (uintptr_t word = request.address[lane] / WORD; word <= last; ++word)
                words[word % BANKS].push_back(word);
        }
        size_t passes = 0;
        for (std::vector<uintptr_t>& bank : words) passes = std::max(passes, different(bank));
        shared.passes += passes;
        shared.least += any;
    }
}

void settle_global(const Request& request, size_t size, Access access) {
    static std::vector<uintptr_t> sectors;
    sectors.clear();
    Region* first = nullptr;
    for (unsigned lane = 0; lane < WARP; ++lane) {
        if (!(request.lanes >> lane & 1)) continue;
        const uintptr_t address = request.address[lane];
        Region& region = region_of(address);
        Traffic& traffic = region.traffic[static_cast<int>(access)];
        if (!first) first = &region;
        traffic.bytes += size;
        for (uintptr_t at = address / SECTOR; at <= (address + size - 1) / SECTOR; ++at) {
            sectors.push_back(at);
            const size_t number = at - region.begin / SECTOR;
            if (number < traffic.touched.size()) traffic.touched[number] = true;
        }
    }
    Traffic& traffic = first->traffic[static_cast<int>(access)];
    ++traffic.requests;
    traffic.sectors += different(sectors);
}

}  // namespace

void count_access(const void* address, size_t size, Access access, const void* site) {
    if (on_stack(address)) return;
    Instruction& here = sites[path() * 1000003 + reinterpret_cast<uintptr_t>(site)];
    if (here.requests.empty()) active_sites.push_back(&here);
    here.size = size;
    here.access = access;
    const unsigned lane = emulator_lane();
    const uint32_t number = here.seen[lane]++;
    if (number == here.requests.size()) here.requests.emplace_back();
    Request& request = here.requests[number];
    request.lanes |= 1u << lane;
    request.address[lane] = reinterpret_cast<uintptr_t>(address);
}

CountedLaunch::CountedLaunch(const Launch& launch) {
    if (!profiling) return;
    Dl_info found = {};
    dladdr(reinterpret_cast<void*>(launch.kernel), &found);
    module_begin = reinterpret_cast<uintptr_t>(found.dli_fbase);
    sites.clear();
    active_sites.clear();
    block_at.clear();
    active_blocks.clear();
    records.push_back({launch.name, found.dli_fname, named, {}, {}});
    counting = true;
}

void begin_counted_block() { std::memset(paths, 0, sizeof paths); }

void settle_warp() {
    for (Instruction* site : active_sites) {
        for (const Request& request : site->requests) {
            const unsigned lane = __builtin_ctz(request.lanes);
            if (in_shared(reinterpret_cast<const void*>(request.address[lane]))) {
                settle_shared(request, site->size);
            } else {
                settle_global(request, site->size, site->access);
            }
        }
        site->requests.clear();
        std::fill_n(site->seen, WARP, 0);
    }
    active_sites.clear();
    for (const uint32_t number : active_blocks) {
        Block& block = records.back().blocks[number];
        block.warps += *std::max_element(block.seen, block.seen + WARP);
        for (uint32_t& seen : block.seen) block.lanes += seen, seen = 0;
        block.active = false;
    }
    active_blocks.clear();
}

void count_block(const void* site) {
    const uintptr_t offset = reinterpret_cast<uintptr_t>(site) - module_begin;
    if (offset >= block_at.size()) block_at.resize(2 * offset);
    std::vector<Block>& blocks = records.back().blocks;
    uint32_t& number = block_at[offset];
    if (!number) {
        blocks.push_back({offset});
        number = blocks.size();
    }
    Block& block = blocks[number - 1];
    ++block.seen[emulator_lane()];
    if (block.active) return;
    block.active = true;
    active_blocks.push_back(number - 1);
}

}  // namespace emulator

using namespace emulator;

extern "C" {

// Counts launches until emulator_profile_end, memory by `count` regions [begin, end).
EMULATOR_VISIBLE void emulator_profile_begin(const uint64_t* begins, const uint64_t* ends,
                                             int64_t count) {
    named.assign(count + 1, {});
    for (int64_t i = 0; i < count; ++i) {
        named[i].begin = begins[i];
        named[i].end = ends[i];
        for (Traffic& traffic : named[i].traffic) {
            traffic.touched.resize((ends[i] + SECTOR - 1) / SECTOR - begins[i] / SECTOR);
        }
    }
    records.clear();
    profiling = true;
}

// Returns the counts since emulator_profile_begin, valid until the next call.
//
// A JSON list with an object for each launch: `kernel`, `module` (path of its library), `regions`,
// the last one for all other memory: [reads, writes, atomics], each [requests, bytes, sectors,
// different sectors]; `shared`: [requests, passes, passes without conflicts]; `blocks`: [address in
// the module after the call of the hook, executions by warps, by lanes].
EMULATOR_VISIBLE const char* emulator_profile_end() {
    profiling = false;
    text = joined(records, [](const Record& record) { return written(record); });
    records.clear();
    return text.c_str();
}

#ifndef LSQ_SANITIZE

// Kernels that are compiled for a profile call this at the beginning of each basic block.
EMULATOR_VISIBLE void __sanitizer_cov_trace_pc() {
    // Collective work runs outside of fibers (emulator_together) and stands for one instruction.
    if (counting && in_kernel) count_block(__builtin_return_address(0));
}

EMULATOR_VISIBLE void __tsan_func_entry(void* caller) {
    if (!counting) return;
    auto& here = paths[current];
    const uint64_t outer = path();
    ++here.depth;
    path() = outer * 31 + reinterpret_cast<uintptr_t>(caller);
}

EMULATOR_VISIBLE void __tsan_func_exit() {
    if (counting) --paths[current].depth;
}

#endif

}  // extern "C"
