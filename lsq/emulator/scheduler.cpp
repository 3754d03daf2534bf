#include "scheduler.h"

#include <algorithm>
#include <cstring>
#include <mutex>
#include <vector>

#include "arrangement.h"
#include "copies.h"
#include "counters.h"
#include "crashes.h"
#include "fibers.h"
#include "races.h"
#include "report.h"
#include "threads.h"
#include "warpgroups.h"

#ifdef LSQ_SANITIZE
#include <sanitizer/asan_interface.h>
#endif

extern "C" {

EMULATOR_VISIBLE emulator::Index threadIdx, blockIdx, blockDim, gridDim;
alignas(1024) unsigned char emulator_dynamic_shared[emulator::LARGEST_SHARED];

}  // extern "C"

namespace emulator {

namespace {

int chosen_order = 0;
std::mutex one_launch;

// The launch that runs.
std::vector<Thread> threads;
Fiber fibers[1024];  // of the threads; their stacks are kept from launch to launch
unsigned current = 0;
const Launch* launched = nullptr;
std::string fault;
Crash crash;

void thread_main() {
    launched->kernel(launched->arguments);
    threads[current].state = State::finished;
    fibers[current].yield();
}

// In a signal's handler: ends the launch. Allocates nothing, for what a kernel has overwritten is unknown.
void leave_crashed(Crash found) {
    crash = found;
    fibers[current].yield();
}

void wait(State state, const char* operation, Site site) {
    in_kernel = 0;
    Thread& thread = threads[current];
    thread.state = state;
    thread.operation = operation;
    thread.site = site;
    fibers[current].yield();
}

[[noreturn]] void refuse_mask(const char* name, uint32_t mask, uint32_t lane, size_t lanes, Site site) {
    in_kernel = 0;
    const std::string call =
        std::string("calls ") + name + " (" + describe(site) + ") with mask " + hexadecimal(mask) + ", but ";
    if (!(mask >> lane & 1)) fail_thread(call + "is itself lane " + std::to_string(lane) + ", which the mask does not name");
    fail_thread(call + "its warp has only " + std::to_string(lanes) + " lanes");
}

// Gives the lanes of a collective their results once all of them have arrived.
void try_collective(unsigned arrived) {
    const unsigned warp = arrived / WARP * WARP;
    const uint32_t mask = threads[arrived].mask;
    const Collective kind = threads[arrived].kind;
    uint32_t ballot = 0;
    for (unsigned lane = 0; lane < WARP; ++lane) {
        if (!(mask >> lane & 1)) continue;
        const Thread& thread = threads[warp + lane];
        if (thread.state != State::collective || thread.mask != mask || thread.kind != kind) return;
        if (kind == Collective::together && thread.together != threads[arrived].together) return;
        ballot |= static_cast<uint32_t>(thread.value != 0) << lane;
    }
    if (kind == Collective::together) {
        void* operands[WARP];
        for (unsigned lane = 0; lane < WARP; ++lane) operands[lane] = threads[warp + lane].operands;
        threads[arrived].together(operands);
    }
    for (unsigned lane = 0; lane < WARP; ++lane) {
        if (!(mask >> lane & 1)) continue;
        Thread& thread = threads[warp + lane];
        if (kind == Collective::ballot) thread.result = ballot;
        if (kind == Collective::shuffle) thread.result = threads[warp + thread.source].value;
        thread.state = State::ready;
    }
    const size_t lanes = std::min<size_t>(WARP, threads.size() - warp);
    if (counting && mask == static_cast<uint32_t>((uint64_t{1} << lanes) - 1)) settle_warp();
}

std::string describe_crash() {
    return fibers[current].overflown(crash.address) ? "needs more stack than it has" : describe(crash);
}

// Runs the threads of a warp until all of them wait or have finished. False after a fault.
bool run_warp(unsigned warp, Order& order, std::vector<unsigned>& lanes) {
    const unsigned first = warp * WARP;
    const size_t count = std::min<size_t>(WARP, threads.size() - first);
    for (bool progress = true; progress;) {
        progress = false;
        order.arrange(lanes, count);
        for (unsigned lane : lanes) {
            Thread& thread = threads[first + lane];
            while (thread.state == State::ready) {
                progress = true;
                current = first + lane;
                threadIdx = thread.index;
                in_kernel = 1;
                fibers[current].resume();
                in_kernel = 0;
                if (crash.signal) fault = describe(thread) + " " + describe_crash();
                if (!fault.empty()) return false;
                if (thread.state == State::collective) try_collective(current);
            }
        }
    }
    if (counting) settle_warp();
    return true;
}

// All threads wait or have finished: lets them pass a barrier that all have reached. False after a fault.
bool pass_barrier() {
    const Thread& first = threads.front();
    for (const Thread& thread : threads) {
        if (thread.state == State::collective) {
            fault = std::string("some lanes of the mask of ") + thread.operation +
                    " do not arrive with the same mask and function: " + describe_all(threads);
            return false;
        }
    }
    for (const Thread& thread : threads) {
        if (thread.state == State::barrier && first.state == State::barrier && same(thread.site, first.site)) continue;
        fault = "not all threads reach the same __syncthreads: " + describe_all(threads);
        return false;
    }
    for (Thread& thread : threads) thread.state = State::ready;
    order_accesses();
    return true;
}

// Fills shared memory with bytes that are NaN as floats, so that reads of what nobody wrote show.
void clear_shared() {
    std::memset(emulator_dynamic_shared, 0xff, launched->shared);
#ifdef LSQ_SANITIZE
    // Red zones lie between the variables: a plain memset would be reported. volatile keeps this from becoming one.
    const Memory memory = launched->static_shared;
    [memory]() __attribute__((no_sanitize("address", "undefined"))) {
        for (volatile unsigned char* byte = memory.begin; byte != memory.end; ++byte) *byte = 0xff;
    }();
#else
    std::memset(launched->static_shared.begin, 0xff, launched->static_shared.end - launched->static_shared.begin);
#endif
}

bool run_block(Order& order) {
    static std::vector<unsigned> warps, lanes;
    const BlockCopies copies;
    const BlockMultiplications multiplications;
    clear_shared();
    order_accesses();
    if (counting) begin_counted_block();
    for (size_t i = 0; i < threads.size(); ++i) {
        threads[i].state = State::ready;
        threads[i].site = {nullptr, 0};
        if (!fibers[i].start(thread_main)) {
            fault = "no memory is left for the stacks of its threads";
            return false;
        }
    }
    while (true) {
        order.arrange(warps, (threads.size() + WARP - 1) / WARP);
        for (unsigned warp : warps) {
            if (!run_warp(warp, order, lanes)) return false;
        }
        fault = different_multiplications(threads.size());
        if (!fault.empty()) return false;
        const auto finished = [](const Thread& thread) { return thread.state == State::finished; };
        if (std::all_of(threads.begin(), threads.end(), finished)) return true;
        if (!pass_barrier()) return false;
    }
}

}  // namespace

void set_order(int order) {
    const std::lock_guard<std::mutex> guard(one_launch);
    chosen_order = order;
}

std::string run(const Launch& launch) {
    const std::lock_guard<std::mutex> guard(one_launch);
    launched = &launch;
    fault.clear();
    crash = {};
    gridDim = launch.grid;
    blockDim = launch.block;
    threads.resize(launch.block.x * launch.block.y * launch.block.z);
    for (unsigned i = 0; i < threads.size(); ++i) {
        threads[i].index = {i % launch.block.x, i / launch.block.x % launch.block.y,
                            i / (launch.block.x * launch.block.y)};
    }
#ifdef LSQ_SANITIZE
    __asan_unpoison_memory_region(emulator_dynamic_shared, LARGEST_SHARED);
    __asan_poison_memory_region(emulator_dynamic_shared + launch.shared, LARGEST_SHARED - launch.shared);
#endif
    watch_shared(launch.static_shared, launch.shared);
    const CrashGuard guard_of_signals(leave_crashed);
    const CountedLaunch counted(launch);
    Order order(chosen_order);
    std::vector<unsigned> blocks;
    order.arrange(blocks, static_cast<size_t>(launch.grid.x) * launch.grid.y * launch.grid.z);
    for (unsigned block : blocks) {
        const unsigned row = block / launch.grid.x;
        blockIdx = {block % launch.grid.x, row % launch.grid.y, row / launch.grid.y};
        if (!run_block(order)) return describe_block(launch.name, blockIdx) + fault;
    }
    return "";
}

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

bool on_stack(const void* address) { return fibers[current].holds(address); }

unsigned running_thread() { return current; }

unsigned running_warp() { return current / WARP; }

}  // namespace emulator

using emulator::Collective;
using emulator::State;

extern "C" {

uint32_t emulator_lane() { return emulator::current % emulator::WARP; }

void emulator_barrier(emulator::Site site) { emulator::wait(State::barrier, "__syncthreads", site); }

uint32_t emulator_collective(Collective kind, const char* name, uint32_t mask, uint32_t value, uint32_t source,
                             emulator::Site site) {
    const uint32_t lane = emulator_lane();
    const size_t first = emulator::current - lane;
    const size_t lanes = std::min<size_t>(emulator::WARP, emulator::threads.size() - first);
    const uint32_t present = static_cast<uint32_t>((uint64_t{1} << lanes) - 1);
    if (!(mask >> lane & 1) || mask & ~present) emulator::refuse_mask(name, mask, lane, lanes, site);
    if (kind == Collective::shuffle && !(source < lanes && mask >> source & 1)) {
        emulator::fail_thread(std::string("reads lane ") + std::to_string(source) + " by " + name + " (" +
                       emulator::describe(site) + "), which its mask " + emulator::hexadecimal(mask) +
                       " does not name");
    }
    emulator::Thread& thread = emulator::threads[emulator::current];
    thread.kind = kind;
    thread.mask = mask;
    thread.value = value;
    thread.source = source;
    thread.result = 0;
    emulator::wait(State::collective, name, site);
    return thread.result;
}

void emulator_together(const char* name, void (*operation)(void* const*), void* operands, emulator::Site site) {
    emulator::Thread& thread = emulator::threads[emulator::current];
    thread.together = operation;
    thread.operands = operands;
    emulator_collective(Collective::together, name, ~uint32_t{0}, 0, 0, site);
}

void emulator_misaligned(const void* address, size_t alignment, emulator::Site site) {
    emulator::fail_thread("accesses " + emulator::hexadecimal(reinterpret_cast<uintptr_t>(address)) + " as a vector (" +
                   emulator::describe(site) + "), which is not aligned to " + std::to_string(alignment) + " bytes");
}

void emulator_unordered(uint32_t places, emulator::Site site) {
    emulator::fail_thread("gives mma.sp (" + emulator::describe(site) + ") the places " + std::to_string(places & 3) +
                          " and " + std::to_string(places >> 2) + " of a group, of which the first must be the smaller");
}

}  // extern "C"
