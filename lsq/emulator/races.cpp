// Finds warps that use the same byte of shared memory with no barrier between them, one of them
// writing; other memory goes to order.h.
//
// A warp has a vector clock: the time of every warp up to which its accesses come before its own
// next one. Times begin anew, later than all before, whenever all threads meet.
//
// Kernels are compiled with -fsanitize=thread, which calls a function before each access; these
// replace ThreadSanitizer's library. Nothing is reported within a warp: the order of its lanes
// shows there.
#include "races.h"

#include <algorithm>
#include <iterator>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "counters.h"
#include "order.h"
#include "report.h"
#include "threads.h"

#ifndef LSQ_SANITIZE

namespace emulator {

namespace {

constexpr uint64_t WARPS = 64, SEVERAL = WARPS - 1;  // of a block there are at most 32
static_assert(std::tuple_size<Seen>() == WARPS, "warps, and SEVERAL");
// Or-ed with the thread whose copy will write this byte.
constexpr uint64_t COPYING = uint64_t{1} << 63;

// Last accesses of a byte: WARPS * time + warp, or WARPS * number of a crowd + SEVERAL, or COPYING;
// read: since the last write; writer: THREADS * fences + thread.
struct Accesses {
    uint64_t write, read, writer;
};
constexpr uint64_t THREADS = 1024;

uint64_t latest = 1;               // of the times, in all launches
Seen seen[WARPS / 2];              // by each warp
std::vector<Accesses> shadows[2];  // of shared memory, static and dynamic
std::vector<uint64_t> fences[THREADS];  // times of each thread's, in this block

// Reads of several warps, by warp, or 0: one crowd for all bytes with the same reads.
using Crowd = std::array<uint64_t, WARPS / 2>;
std::vector<Crowd> crowds;  // since all threads met
uint64_t old_crowds = 0;    // before that, in all launches
std::map<std::pair<uint64_t, uint64_t>, uint64_t> joined;  // a byte's reads and one more
// Multiplications that read a chunk of dynamic shared memory.
uint32_t readers[LARGEST_SHARED / 16];
uint64_t all_readers = 0;
uint64_t first_time = 1;  // of the block that runs

inline uint64_t now(uint64_t warp) { return WARPS * seen[warp][warp] + warp; }

// Whether nothing orders an access before the next one of a warp; of a crowd: whether it is new.
inline bool unseen(uint64_t access, uint64_t warp) {
    return access / WARPS > seen[warp][access % WARPS];
}

[[noreturn]] void report(const char* does, const char* did, uint64_t access) {
    fail_thread(std::string(does) + " shared memory that warp " + std::to_string(access % WARPS) +
                did + " with no barrier between the two" + waited());
}

[[noreturn]] void report_copy(const char* does, uint64_t thread) {
    fail_thread(std::string(does) + " shared memory that a copy of thread " +
                std::to_string(thread) + " still fills, which has not waited for it" + waited());
}

inline uint64_t writer() { return THREADS * fences[current].size() + current; }

inline Crowd& crowd_of(uint64_t reads) { return crowds[reads / WARPS - old_crowds - 1]; }

// One of a byte's reads that nothing orders before the next access of a warp, or 0.
uint64_t unseen_read(uint64_t reads, uint64_t warp) {
    if (!unseen(reads, warp)) return 0;
    if (reads % WARPS != SEVERAL) return reads;
    for (const uint64_t read : crowd_of(reads)) {
        if (unseen(read, warp)) return read;
    }
    return 0;
}

// A byte's reads and that of a warp.
inline uint64_t with_read(uint64_t reads, uint64_t warp) {
    static uint64_t last_reads = 0, last_read = 0, last = 0;
    const uint64_t read = now(warp);
    if (read == last_read && (reads == last || reads == last_reads)) return last;
    if (!unseen(reads, warp)) return read;
    last_reads = reads, last_read = read, last = reads;
    const bool several = reads % WARPS == SEVERAL;
    if (several && crowd_of(reads)[warp] == read) return last;
    const auto [found, is_new] = joined.emplace(std::make_pair(reads, read), 0);
    if (is_new) {
        Crowd crowd = {};
        if (several) crowd = crowd_of(reads);
        if (!several) crowd[reads % WARPS] = reads;
        crowd[warp] = read;
        crowds.push_back(crowd);
        found->second = WARPS * (old_crowds + crowds.size()) + SEVERAL;
    }
    return last = found->second;
}

inline void record(Accesses& byte, uint64_t warp, bool writes) {
    if (byte.write & COPYING) report_copy(writes ? "writes" : "reads", byte.write & ~COPYING);
    if (unseen(byte.write, warp)) report(writes ? "writes" : "reads", " wrote", byte.write);
    if (writes) {
        if (const uint64_t read = unseen_read(byte.read, warp)) report("writes", " read", read);
        byte = {now(warp), 0, writer()};
    } else {
        byte.read = with_read(byte.read, warp);
    }
}

uint32_t& readers_of(const void* address) {
    return readers[(static_cast<const unsigned char*>(address) - emulator_dynamic_shared) / 16];
}

void check_readers(const void* address, size_t size) {
    const auto* byte = static_cast<const unsigned char*>(address);
    if (static_cast<size_t>(byte - emulator_dynamic_shared) >= launched->shared) return;
    if (!readers_of(byte) && !readers_of(byte + size - 1)) return;
    fail_thread("writes shared memory that wgmma still reads, which has not been waited for" +
                waited());
}

// Calls change(accesses) for each byte of shared memory in [address, address + size).
template <typename Change>
void for_shared(const void* address, size_t size, const Change& change) {
    for (int dynamically = 0; dynamically < 2; ++dynamically) {
        const Memory dynamic = {emulator_dynamic_shared,
                                emulator_dynamic_shared + launched->shared};
        const Memory memory = dynamically ? dynamic : launched->static_shared;
        std::vector<Accesses>& shadow = shadows[dynamically];
        const size_t bytes = memory.end - memory.begin;
        const size_t offset = static_cast<const unsigned char*>(address) - memory.begin;
        if (offset >= bytes) continue;
        if (shadow.size() < bytes) shadow.resize(bytes);
        for (size_t i = offset; i < offset + size && i < bytes; ++i) change(shadow[i]);
    }
}

void touch_global(const void* address, size_t size, bool writes) {
    if (on_stack(address)) return;
    const std::string fault = use(address, size, writes);
    if (!fault.empty()) fail_thread(fault);
}

// The memory of blocks that have more.
inline void check_beyond_shared(const void* address, size_t size, bool writes) {
    const auto begin = reinterpret_cast<uintptr_t>(emulator_dynamic_shared);
    const size_t offset = reinterpret_cast<uintptr_t>(address) - begin;
    if (offset >= LARGEST_SHARED || offset + size <= launched->shared) return;
    fail_thread((writes ? "writes " : "reads ") + std::to_string(size) + " bytes from byte " +
                std::to_string(offset) + " on of dynamic shared memory, of which its block has " +
                std::to_string(launched->shared) + waited());
}

inline void touch(const void* address, size_t size, bool writes, const void* site) {
    if (counting) count_access(address, size, writes ? Access::write : Access::read, site);
    check_beyond_shared(address, size, writes);
    if (in_shared(address)) {
        const uint64_t warp = running_warp();
        if (writes && all_readers) check_readers(address, size);
        for_shared(address, size, [warp, writes](Accesses& byte) { record(byte, warp, writes); });
    } else if (watching) {
        touch_global(address, size, writes);
    }
}

}  // namespace

void order_accesses() {
    old_crowds += crowds.size();
    crowds.clear();
    joined.clear();
    for (size_t warp = 0; warp * WARP < threads.size(); ++warp) {
        seen[warp].fill(latest);
        seen[warp][warp] = latest + 1;
        seen[warp][SEVERAL] = old_crowds;
    }
    ++latest;
}

void release(unsigned warp, Seen& barrier) {
    for (size_t i = 0; i < SEVERAL; ++i) barrier[i] = std::max(barrier[i], seen[warp][i]);
    seen[warp][warp] = ++latest;
}

void acquire(unsigned warp, const Seen& barrier) {
    for (size_t i = 0; i < SEVERAL; ++i) seen[warp][i] = std::max(seen[warp][i], barrier[i]);
}

uint64_t time_of(unsigned warp) { return seen[warp][warp]; }

bool has_seen(unsigned warp, unsigned other, uint64_t time) { return seen[warp][other] >= time; }

void begin_copy(const void* to, size_t size, const void* site) {
    touch(to, size, true, site);
    const uint64_t copying = COPYING | current;
    for_shared(to, size, [copying](Accesses& byte) { byte.write = copying; });
}

void end_copy(const void* to, size_t size) {
    const Accesses written = {now(running_warp()), 0, writer()};
    for_shared(to, size, [&written](Accesses& byte) { byte = written; });
}

void begin_reading(const void* from, size_t size) {
    for_shared(from, size, [](Accesses& byte) {
        record(byte, running_warp(), false);
        const uint64_t thread = byte.writer % THREADS, before = byte.writer / THREADS;
        if (byte.write / WARPS < first_time) return;
        // The first fence behind the write must itself come before.
        const std::vector<uint64_t>& times = fences[thread];
        if (before < times.size() && times[before] <= seen[running_warp()][thread / WARP]) return;
        fail_thread("begins wgmma of shared memory that thread " + std::to_string(thread) +
                    " wrote with no fence.proxy.async behind it" + waited());
    });
    ++readers_of(from), ++all_readers;
}

void end_reading(const void* from, size_t size) {
    --readers_of(from), --all_readers;
    for_shared(from, size, [](Accesses& byte) { record(byte, running_warp(), false); });
}

void end_readers() {
    if (all_readers) std::fill(std::begin(readers), std::end(readers), 0);
    all_readers = 0;
    for (std::vector<uint64_t>& times : fences) times.clear();
    first_time = latest + 1;
}

}  // namespace emulator

using namespace emulator;

extern "C" {

#define HOOK EMULATOR_VISIBLE void
#define SITE __builtin_return_address(0)

HOOK emulator_atomic(const void* address, size_t size) {
    if (counting) count_access(address, size, Access::atomic, SITE);
    if (watching && !in_shared(address)) touch_global(address, size, true);
}

HOOK emulator_fence_shared() {
    fences[current].push_back(seen[running_warp()][running_warp()]);
}

HOOK __tsan_init() {}
HOOK __tsan_read_range(const void* address, size_t size) { touch(address, size, false, SITE); }
HOOK __tsan_write_range(const void* address, size_t size) { touch(address, size, true, SITE); }
// Whole vectors, by functions without such calls.
HOOK emulator_read(const void* address, size_t size, const void* site) {
    touch(address, size, false, site);
}
HOOK emulator_write(const void* address, size_t size, const void* site) {
    touch(address, size, true, site);
}

#define ACCESSES(bytes)                                                                  \
    HOOK __tsan_read##bytes(const void* address) { touch(address, bytes, false, SITE); } \
    HOOK __tsan_write##bytes(const void* address) { touch(address, bytes, true, SITE); }
#define UNALIGNED(bytes)                                                                           \
    HOOK __tsan_unaligned_read##bytes(const void* address) { touch(address, bytes, false, SITE); } \
    HOOK __tsan_unaligned_write##bytes(const void* address) { touch(address, bytes, true, SITE); }
ACCESSES(1)
ACCESSES(2)
ACCESSES(4)
ACCESSES(8)
ACCESSES(16)
UNALIGNED(2)
UNALIGNED(4)
UNALIGNED(8)
UNALIGNED(16)

}  // extern "C"

#else

namespace emulator {

void order_accesses() {}
void release(unsigned, Seen&) {}
void acquire(unsigned, const Seen&) {}
uint64_t time_of(unsigned) { return 0; }
bool has_seen(unsigned, unsigned, uint64_t) { return true; }
void begin_copy(const void*, size_t, const void*) {}
void end_copy(const void*, size_t) {}
void begin_reading(const void*, size_t) {}
void end_reading(const void*, size_t) {}
void end_readers() {}

}  // namespace emulator

extern "C" {

void emulator_atomic(const void*, size_t) {}
void emulator_fence_shared() {}
void emulator_read(const void*, size_t, const void*) {}
void emulator_write(const void*, size_t, const void*) {}

}  // extern "C"

#endif
