#include "threads.h"

#include <algorithm>

#include "report.h"

alignas(1024) unsigned char emulator_dynamic_shared[emulator::LARGEST_SHARED];

namespace emulator {

const Launch* launched = nullptr;
std::vector<Thread> threads;
Fiber fibers[1024];
unsigned current = 0;
std::string fault;

namespace {

void wait(State state, const char* operation, Site site) {
    in_kernel = 0;
    Thread& thread = threads[current];
    thread.state = state;
    thread.operation = operation;
    thread.site = site;
    fibers[current].yield();
}

}  // namespace

std::string describe(Index index) {
    return "(" + std::to_string(index.x) + ", " + std::to_string(index.y) + ", " +
           std::to_string(index.z) + ")";
}

std::string describe(const Thread& thread) { return "thread " + describe(thread.index); }

void fail_thread(const std::string& message) {
    in_kernel = 0;
    fault = describe(threads[current]) + " " + message;
    fibers[current].yield();
    __builtin_unreachable();
}

std::string waited() {
    in_kernel = 0;
    const Site site = threads[current].site;
    return site.file ? ", after it waited at " + describe(site) : "";
}

}  // namespace emulator

using namespace emulator;

extern "C" {

uint32_t emulator_lane() { return current % WARP; }

void emulator_barrier(Site site) { wait(State::barrier, "__syncthreads", site); }

uint32_t emulator_collective(Collective kind, const char* name, uint32_t mask, uint32_t value,
                             uint32_t source, Site site) {
    const uint32_t lane = emulator_lane();
    const size_t lanes = std::min<size_t>(WARP, threads.size() - (current - lane));
    const uint32_t present = static_cast<uint32_t>((uint64_t{1} << lanes) - 1);
    const auto call = [&] { return std::string(name) + " (" + describe(site) + ")"; };
    const auto with_mask = [&] {
        in_kernel = 0;
        return "calls " + call() + " with mask " + hexadecimal(mask) + ", but ";
    };
    if (!(mask >> lane & 1)) {
        fail_thread(with_mask() + "is itself lane " + std::to_string(lane) +
                    ", which the mask does not name");
    }
    if (mask & ~present)
        fail_thread(with_mask() + "its warp has only " + std::to_string(lanes) + " lanes");
    if (kind == Collective::shuffle && !(source < lanes && mask >> source & 1)) {
        fail_thread("reads lane " + std::to_string(source) + " by " + call() + ", which its mask " +
                    hexadecimal(mask) + " does not name");
    }
    Thread& thread = threads[current];
    thread.kind = kind;
    thread.mask = mask;
    thread.value = value;
    thread.source = source;
    thread.result = 0;
    wait(State::collective, name, site);
    return thread.result;
}

void emulator_together(const char* name, void (*operation)(void* const*), void* operands,
                       Site site) {
    Thread& thread = threads[current];
    thread.together = operation;
    thread.operands = operands;
    emulator_collective(Collective::together, name, ~uint32_t{0}, 0, 0, site);
}

void emulator_check_shared(const void* address, size_t size, const char* name, Site site) {
    const auto* first = static_cast<const unsigned char*>(address);
    if (in_shared(first) && in_shared(first + size - 1)) return;
    fail_thread("gives " + hexadecimal(address) + " to " + name + " (" + describe(site) +
                "), which is not shared memory of its block");
}

void emulator_misaligned(const void* address, size_t alignment, Site site) {
    fail_thread("accesses " + hexadecimal(address) + " as a vector (" + describe(site) +
                "), which is not aligned to " + std::to_string(alignment) + " bytes");
}

void emulator_unordered(uint32_t indices, Site site) {
    fail_thread("gives mma.sp (" + describe(site) + ") the places " + std::to_string(indices & 3) +
                " and " + std::to_string(indices >> 2) +
                " of a group, of which the first must be the smaller");
}

}  // extern "C"
