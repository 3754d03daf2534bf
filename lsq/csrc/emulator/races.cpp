// Finds warps that touch the same byte of shared memory between two barriers, where at least one of them writes, and
// tells order.h of all other memory.
//
// Kernels are compiled with -fsanitize=thread, which calls a function before each access to memory; these stand in for
// those of ThreadSanitizer's library. Within a warp nothing is reported: the order of its lanes shows there.
#include "races.h"

#include <string>
#include <vector>

#include "counters.h"
#include "order.h"
#include "scheduler.h"

#ifndef LSQ_SANITIZE

namespace emulator {

namespace {

constexpr uint64_t WARPS = 64, SEVERAL = WARPS - 1;  // of a block there are at most 32

// Of one byte: WARPS * epoch + the warp that did it last, or SEVERAL.
struct Accesses {
    uint64_t write, read;
};

uint64_t epoch = 1;  // barriers and blocks so far, in all launches
uintptr_t begins[2], sizes[2];
std::vector<Accesses> shadows[2];

bool others(uint64_t access, uint64_t warp) { return access / WARPS == epoch && access % WARPS != warp; }

[[noreturn]] void report(const char* does, const char* did, uint64_t access) {
    const uint64_t warp = access % WARPS;
    const std::string who = warp == SEVERAL ? "several warps" : "warp " + std::to_string(warp);
    fail_thread(std::string(does) + " shared memory that " + who + did + " with no __syncthreads between the two" + waited());
}

void record(Accesses& byte, uint64_t warp, bool writes) {
    if (others(byte.write, warp)) report(writes ? "writes" : "reads", " wrote", byte.write);
    const uint64_t now = WARPS * epoch + warp;
    if (writes) {
        if (others(byte.read, warp)) report("writes", " read", byte.read);
        byte.write = now;
    } else {
        byte.read = others(byte.read, warp) ? WARPS * epoch + SEVERAL : now;
    }
}

bool in_shared(const void* address) {
    const uintptr_t at = reinterpret_cast<uintptr_t>(address);
    return at - begins[0] < sizes[0] || at - begins[1] < sizes[1];
}

void touch_global(const void* address, size_t size, bool writes) {
    if (on_stack(address)) return;
    const std::string fault = use(address, size, writes);
    if (!fault.empty()) fail_thread(fault);
}

inline void touch(const void* address, size_t size, bool writes, const void* site) {
    if (counting) count_access(address, size, writes ? Access::write : Access::read, site);
    for (int place = 0; place < 2; ++place) {
        const uintptr_t offset = reinterpret_cast<uintptr_t>(address) - begins[place];
        if (offset >= sizes[place]) continue;
        const uint64_t warp = running_warp();
        for (size_t i = offset; i < offset + size && i < sizes[place]; ++i) record(shadows[place][i], warp, writes);
        return;
    }
    if (watching) touch_global(address, size, writes);
}

}  // namespace

void watch_shared(Memory static_shared, size_t dynamic) {
    begins[0] = reinterpret_cast<uintptr_t>(static_shared.begin);
    begins[1] = reinterpret_cast<uintptr_t>(emulator_dynamic_shared);
    sizes[0] = static_shared.end - static_shared.begin;
    sizes[1] = dynamic;
    for (int place = 0; place < 2; ++place) {
        if (shadows[place].size() < sizes[place]) shadows[place].resize(sizes[place]);
    }
}

void order_accesses() { ++epoch; }

}  // namespace emulator

using emulator::touch;

extern "C" {

#define HOOK EMULATOR_VISIBLE void
#define SITE __builtin_return_address(0)

HOOK emulator_atomic(const void* address, size_t size) {
    if (emulator::counting) emulator::count_access(address, size, emulator::Access::atomic, SITE);
    if (emulator::watching && !emulator::in_shared(address)) emulator::touch_global(address, size, true);
}

HOOK __tsan_init() {}
HOOK __tsan_read_range(const void* address, size_t size) { touch(address, size, false, SITE); }
HOOK __tsan_write_range(const void* address, size_t size) { touch(address, size, true, SITE); }
// Of whole vectors, which kernels load and store by functions without such calls.
HOOK emulator_read(const void* address, size_t size, const void* site) { touch(address, size, false, site); }
HOOK emulator_write(const void* address, size_t size, const void* site) { touch(address, size, true, site); }

#define ACCESSES(bytes)                                                                            \
    HOOK __tsan_read##bytes(const void* address) { touch(address, bytes, false, SITE); }           \
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

void watch_shared(Memory, size_t) {}
void order_accesses() {}

}  // namespace emulator

extern "C" {

void emulator_atomic(const void*, size_t) {}
void emulator_read(const void*, size_t, const void*) {}
void emulator_write(const void*, size_t, const void*) {}

}  // extern "C"

#endif
