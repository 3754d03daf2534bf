// Finds warps that use the same byte of shared memory between two barriers, one of them writing;
// other memory goes to order.h.
//
// Kernels are compiled with -fsanitize=thread, which calls a function before each access; these
// replace ThreadSanitizer's library. Nothing is reported within a warp: the order of its lanes
// shows there.
#include "races.h"

#include <algorithm>
#include <iterator>
#include <string>
#include <vector>

#include "counters.h"
#include "order.h"
#include "report.h"
#include "threads.h"

#ifndef LSQ_SANITIZE

namespace emulator {

namespace {

constexpr uint64_t WARPS = 64, SEVERAL = WARPS - 1;  // of a block there are at most 32
// Or-ed with the thread whose copy will write this byte.
constexpr uint64_t COPYING = uint64_t{1} << 63;

// Last accesses of a byte: WARPS * epoch + warp, or SEVERAL, or COPYING; writer: THREADS * fences +
// thread.
struct Accesses {
    uint64_t write, read, writer;
};
constexpr uint64_t THREADS = 1024;

uint64_t epoch = 1;                // barriers and blocks so far, in all launches
std::vector<Accesses> shadows[2];  // of shared memory, static and dynamic
uint64_t fences[THREADS];          // of each thread so far, in all launches
// Multiplications that read a chunk of dynamic shared memory.
uint32_t readers[LARGEST_SHARED / 16];
uint64_t all_readers = 0;
uint64_t first_epoch = 1;  // of the block that runs

bool others(uint64_t access, uint64_t warp) {
    return access / WARPS == epoch && access % WARPS != warp;
}

[[noreturn]] void report(const char* does, const char* did, uint64_t access) {
    const uint64_t warp = access % WARPS;
    const std::string who = warp == SEVERAL ? "several warps" : "warp " + std::to_string(warp);
    fail_thread(std::string(does) + " shared memory that " + who + did +
                " with no __syncthreads between the two" + waited());
}

[[noreturn]] void report_copy(const char* does, uint64_t thread) {
    fail_thread(std::string(does) + " shared memory that a copy of thread " +
                std::to_string(thread) + " still fills, which has not waited for it" + waited());
}

uint64_t writer() { return THREADS * fences[current] + current; }

void record(Accesses& byte, uint64_t warp, bool writes) {
    if (byte.write & COPYING) report_copy(writes ? "writes" : "reads", byte.write & ~COPYING);
    if (others(byte.write, warp)) report(writes ? "writes" : "reads", " wrote", byte.write);
    const uint64_t now = WARPS * epoch + warp;
    if (writes) {
        if (others(byte.read, warp)) report("writes", " read", byte.read);
        byte.write = now;
        byte.writer = writer();
    } else {
        byte.read = others(byte.read, warp) ? WARPS * epoch + SEVERAL : now;
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

inline void touch(const void* address, size_t size, bool writes, const void* site) {
    if (counting) count_access(address, size, writes ? Access::write : Access::read, site);
    if (in_shared(address)) {
        const uint64_t warp = running_warp();
        if (writes && all_readers) check_readers(address, size);
        for_shared(address, size, [warp, writes](Accesses& byte) { record(byte, warp, writes); });
    } else if (watching) {
        touch_global(address, size, writes);
    }
}

}  // namespace

void order_accesses() { ++epoch; }

void begin_copy(const void* to, size_t size, const void* site) {
    touch(to, size, true, site);
    const uint64_t copying = COPYING | current;
    for_shared(to, size, [copying](Accesses& byte) { byte.write = copying; });
}

void end_copy(const void* to, size_t size) {
    const Accesses now = {WARPS * epoch + running_warp(), 0, writer()};
    for_shared(to, size,
               [&now](Accesses& byte) { byte.write = now.write, byte.writer = now.writer; });
}

void begin_reading(const void* from, size_t size) {
    for_shared(from, size, [](Accesses& byte) {
        record(byte, running_warp(), false);
        const uint64_t thread = byte.writer % THREADS;
        if (byte.write / WARPS < first_epoch || byte.writer / THREADS != fences[thread]) return;
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
    first_epoch = epoch + 1;
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

HOOK emulator_fence_shared() { ++fences[current]; }

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
