#include "threads.h"

#include <pthread.h>

#include <algorithm>
#include <csignal>
#include <cstring>
#include <iterator>
#include <mutex>
#include <numeric>
#include <random>
#include <vector>

#include "counters.h"
#include "races.h"
#include "report.h"

#ifdef LSQ_SANITIZE
#include <sanitizer/asan_interface.h>
#endif

extern "C" {
EMULATOR_VISIBLE emulator::Index threadIdx, blockIdx, blockDim, gridDim;
}

namespace emulator {

volatile std::sig_atomic_t in_kernel = 0;

namespace {

struct Crash {
    int signal = 0;  // 0: none
    void* address = nullptr;
};

// Calls `leave`, which must not return, on a stack of its own for a crash of this thread in a
// kernel, as long as it lives. Under the sanitizers it does nothing: they report and end the
// process.
class CrashGuard {
public:
    explicit CrashGuard(void (*leave)(Crash));
    ~CrashGuard();
    CrashGuard(const CrashGuard&) = delete;
    CrashGuard& operator=(const CrashGuard&) = delete;
};

struct Kind {
    int signal;
    const char* words;
    bool at_address;
};
constexpr Kind KINDS[] = {
    {SIGSEGV, "reads or writes what is not its memory (SIGSEGV)", true},
    {SIGBUS, "reads or writes what is not its memory (SIGBUS)", true},
    {SIGFPE, "divides by zero (SIGFPE)", false},
    {SIGILL, "runs into an illegal instruction, such as __builtin_trap (SIGILL)", false},
    {SIGTRAP, "runs into a trap (SIGTRAP)", false},
    {SIGABRT, "calls abort, by an assertion or an exception (SIGABRT)", false},
};

// "calls abort (SIGABRT)"
std::string describe(const Crash& crash) {
    for (const Kind& kind : KINDS) {
        if (kind.signal != crash.signal) continue;
        const std::string where = ", at " + hexadecimal(crash.address);
        return kind.words + (kind.at_address ? where : "");
    }
    return "ends by signal " + std::to_string(crash.signal);
}

#ifdef LSQ_SANITIZE

CrashGuard::CrashGuard(void (*)(Crash)) {}
CrashGuard::~CrashGuard() = default;

#else

// Only one launch runs at a time, so that there is one of each.
alignas(64) unsigned char signal_stack[64 * 1024];
stack_t stack_before;
struct sigaction before[std::size(KINDS)];
pthread_t guarded;
void (*leave_kernel)(Crash);

void handle(int signal, siginfo_t* information, void*) {
    if (in_kernel && pthread_equal(pthread_self(), guarded)) {
        in_kernel = 0;
        leave_kernel({signal, information->si_addr});
    }
    for (size_t i = 0; i < std::size(KINDS); ++i) {
        if (KINDS[i].signal == signal) sigaction(signal, &before[i], nullptr);
    }
    raise(signal);
}

CrashGuard::CrashGuard(void (*leave)(Crash)) {
    leave_kernel = leave;
    guarded = pthread_self();
    stack_t stack = {};
    stack.ss_sp = signal_stack;
    stack.ss_size = sizeof signal_stack;
    sigaltstack(&stack, &stack_before);
    struct sigaction action = {};
    action.sa_sigaction = handle;
    // The handler is left without returning.
    action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
    for (size_t i = 0; i < std::size(KINDS); ++i) sigaction(KINDS[i].signal, &action, &before[i]);
}

CrashGuard::~CrashGuard() {
    for (size_t i = 0; i < std::size(KINDS); ++i) sigaction(KINDS[i].signal, &before[i], nullptr);
    sigaltstack(&stack_before, nullptr);
}

#endif

int chosen_order = 0;
std::mutex one_launch;
Crash crash;

// Arranges positions in the chosen order; a random one is new in each call.
class Order {
public:
    explicit Order(int order) : order_(order), generator_(static_cast<unsigned>(order)) {}

    void arrange(std::vector<unsigned>& positions, size_t count) {
        positions.resize(count);
        std::iota(positions.begin(), positions.end(), 0u);
        if (order_ == 1) std::reverse(positions.begin(), positions.end());
        if (order_ != 0 && order_ != 1)
            std::shuffle(positions.begin(), positions.end(), generator_);
    }

private:
    int order_;
    std::minstd_rand generator_;
};

void thread_main() {
    launched->kernel(launched->arguments);
    threads[current].state = State::finished;
    fibers[current].yield();
}

// Ends the launch, in a signal's handler. Allocates nothing: a kernel may have overwritten
// anything.
void leave_crashed(Crash found) {
    crash = found;
    fibers[current].yield();
}

// Finishes a collective once all of its lanes have arrived.
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
    for (unsigned lane = 0; lane < WARP; ++lane) {
        if (!(mask >> lane & 1)) continue;
        Thread& thread = threads[warp + lane];
        if (kind == Collective::ballot) thread.result = ballot;
        if (kind == Collective::shuffle) thread.result = threads[warp + thread.source].value;
        thread.state = State::ready;
    }
    if (kind == Collective::together) {
        void* operands[WARP];
        for (unsigned lane = 0; lane < WARP; ++lane) operands[lane] = threads[warp + lane].operands;
        threads[arrived].together(operands);
    }
    const size_t lanes = std::min<size_t>(WARP, threads.size() - warp);
    if (counting && mask == static_cast<uint32_t>((uint64_t{1} << lanes) - 1)) settle_warp();
}

// "(0, 0, 0) and 39 more: wait at __syncthreads (reduce.cuh:41); ...", grouped by what threads wait
// for.
std::string describe_waits() {
    const auto wait_of = [](const Thread& thread) -> std::string {
        if (thread.state == State::finished) return " finished";
        const std::string mask =
            thread.state == State::collective ? ", mask " + hexadecimal(thread.mask) : "";
        return std::string(": wait at ") + thread.operation + " (" + describe(thread.site) + mask +
               ")";
    };
    std::vector<std::string> waits;
    std::vector<std::vector<const Thread*>> groups;
    for (const Thread& thread : threads) {
        const std::string wait = wait_of(thread);
        const size_t group = std::find(waits.begin(), waits.end(), wait) - waits.begin();
        if (group == waits.size()) {
            waits.push_back(wait);
            groups.emplace_back();
        }
        groups[group].push_back(&thread);
    }
    std::string text;
    for (size_t group = 0; group < groups.size(); ++group) {
        text += (group ? "; " : "") + describe(*groups[group].front());
        if (groups[group].size() > 1)
            text += " and " + std::to_string(groups[group].size() - 1) + " more";
        text += waits[group];
    }
    return text;
}

// Runs a warp until all threads wait or have finished. False after a fault.
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
                if (crash.signal) {
                    const bool overflown = fibers[current].overflown(crash.address);
                    fault = describe(thread) + " " +
                            (overflown ? "needs more stack than it has" : describe(crash));
                }
                if (fault.empty() && thread.state == State::collective) try_collective(current);
                if (!fault.empty()) return false;
            }
        }
    }
    if (counting) settle_warp();
    return true;
}

bool any(State state) {
    return std::any_of(threads.begin(), threads.end(),
                       [state](const Thread& thread) { return thread.state == state; });
}

// Lets all threads pass the __syncthreads that they have reached. False after a fault.
bool pass_barrier() {
    const Site site = threads.front().site;
    for (const Thread& thread : threads) {
        if (thread.state != State::collective) continue;
        fault = std::string("some lanes of the mask of ") + thread.operation +
                " do not arrive with the same mask and function: " + describe_waits();
        return false;
    }
    if (any(State::named_barrier)) {
        fault = "no thread can go on: " + describe_waits() + open_barriers();
        return false;
    }
    for (const Thread& thread : threads) {
        if (thread.state == State::barrier && threads.front().state == State::barrier &&
            thread.site.line == site.line && std::strcmp(thread.site.file, site.file) == 0) {
            continue;
        }
        fault = "not all threads reach the same __syncthreads: " + describe_waits();
        return false;
    }
    for (Thread& thread : threads) thread.state = State::ready;
    order_accesses();
    return true;
}

// Fills shared memory with NaN, so that reads of unwritten memory show.
void clear_shared() {
    std::memset(emulator_dynamic_shared, 0xff, launched->shared);
#ifdef LSQ_SANITIZE
    // Red zones lie between variables: memset would be reported; volatile avoids one.
    const Memory memory = launched->static_shared;
    [memory]() __attribute__((no_sanitize("address", "undefined"))) {
        for (volatile unsigned char* byte = memory.begin; byte != memory.end; ++byte) *byte = 0xff;
    }();
#else
    std::memset(launched->static_shared.begin, 0xff,
                launched->static_shared.end - launched->static_shared.begin);
#endif
}

bool run_block(Order& order) {
    static std::vector<unsigned> warps, lanes;
    clear_shared();
    order_accesses();
    close_barriers();
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
        if (any(State::ready)) continue;  // others have come to their named barrier
        if (!any(State::named_barrier)) fault = different_multiplications();
        if (!fault.empty()) return false;
        const auto finished = [](const Thread& thread) { return thread.state == State::finished; };
        if (std::all_of(threads.begin(), threads.end(), finished)) {
            if (!open_barriers().empty()) fault = "all threads have finished" + open_barriers();
            return fault.empty();
        }
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
    __asan_poison_memory_region(emulator_dynamic_shared + launch.shared,
                                LARGEST_SHARED - launch.shared);
#endif
    const CrashGuard guard_of_signals(leave_crashed);
    const CountedLaunch counted(launch);
    Order order(chosen_order);
    std::vector<unsigned> blocks;
    order.arrange(blocks, static_cast<size_t>(launch.grid.x) * launch.grid.y * launch.grid.z);
    for (unsigned block : blocks) {
        const unsigned row = block / launch.grid.x;
        blockIdx = {block % launch.grid.x, row % launch.grid.y, row / launch.grid.y};
        const bool sound = run_block(order);
        abandon_asynchronous();
        if (!sound)
            return std::string("kernel ") + launch.name + ", block " + describe(blockIdx) + ": " +
                   fault;
    }
    return "";
}

}  // namespace emulator
