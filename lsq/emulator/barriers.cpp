// Named barriers of the running block.
#include <utility>

#include "races.h"
#include "report.h"
#include "threads.h"

namespace emulator {

namespace {

constexpr int BARRIERS = 16;

// What a lane calls.
struct Call {
    int barrier, count;
    bool waits;
    Site site;
};

// A warp that has come to a barrier, and when.
struct Arrival {
    unsigned warp;
    Call call;
    uint64_t time;
};

// A barrier is open as long as some warps have come, and not all.
struct Barrier {
    std::vector<Arrival> here;    // that have come
    std::vector<Arrival> before;  // that it let go last
    Seen seen;                    // by all who are here
};

Barrier barriers[BARRIERS];

const char* name_of(const Call& call) { return call.waits ? "bar.sync" : "bar.arrive"; }

// "barrier 3 of 64 threads by bar.sync (barriers.cuh:21)"
std::string describe(const Call& call) {
    return "barrier " + std::to_string(call.barrier) + " of " + std::to_string(call.count) +
           " threads by " + name_of(call) + " (" + describe(call.site) + ")";
}

// Lets all go on who wait at a barrier to which the last warp has come.
void complete(Barrier& barrier) {
    for (const Arrival& arrival : barrier.here) {
        if (!arrival.call.waits) continue;
        acquire(arrival.warp, barrier.seen);
        for (unsigned lane = 0; lane < WARP; ++lane)
            threads[arrival.warp * WARP + lane].state = State::ready;
    }
    barrier = {{}, std::move(barrier.here), {}};
}

// The running warp, whose lanes have met, comes to a barrier.
void come(void* const* operands) {
    const unsigned warp = running_warp(), first = warp * WARP;
    const Call call = *static_cast<const Call*>(operands[0]);
    for (unsigned lane = 1; lane < WARP; ++lane) {
        const Call& other = *static_cast<const Call*>(operands[lane]);
        if (other.barrier == call.barrier && other.count == call.count &&
            other.waits == call.waits && other.site.line == call.site.line)
            continue;
        fault = describe(threads[first]) + " comes to " + describe(call) + ", but " +
                describe(threads[first + lane]) + " of its warp to " + describe(other);
        return;
    }
    Barrier& barrier = barriers[call.barrier];
    const auto fail = [&](const std::string& words) {
        fault = "warp " + std::to_string(warp) + " comes to " + describe(call) + ", to which ";
        fault += words;
    };
    for (const Arrival& other : barrier.here) {
        if (other.warp == warp) return fail("it has come already, and not all others");
        if (other.call.count != call.count)
            return fail("warp " + std::to_string(other.warp) + " has come as " +
                        describe(other.call));
    }
    // Else it may be the first of the two.
    for (const Arrival& other : barrier.before) {
        if (other.warp == warp || has_seen(warp, other.warp, other.time)) continue;
        return fail("warp " + std::to_string(other.warp) + " came before by " +
                    name_of(other.call) + " (" + describe(other.call.site) +
                    ") with nothing that orders the two");
    }
    barrier.here.push_back({warp, call, time_of(warp)});
    release(warp, barrier.seen);
    if (call.waits) {
        for (unsigned lane = 0; lane < WARP; ++lane)
            threads[first + lane].state = State::named_barrier;
    }
    if (barrier.here.size() * WARP == static_cast<size_t>(call.count)) complete(barrier);
}

}  // namespace

void close_barriers() {
    for (Barrier& barrier : barriers) barrier = {};
}

std::string open_barriers() {
    std::string text;
    for (const Barrier& barrier : barriers) {
        if (barrier.here.empty()) continue;
        const Call& call = barrier.here.front().call;
        text += "; barrier " + std::to_string(call.barrier) + " waits for " +
                std::to_string(call.count) + " threads, of which " +
                std::to_string(barrier.here.size() * WARP) + " have come:";
        for (const Arrival& arrival : barrier.here) {
            text += (&arrival == &barrier.here.front() ? " warp " : ", warp ") +
                    std::to_string(arrival.warp) + " by " + name_of(arrival.call) + " (" +
                    describe(arrival.call.site) + ")";
        }
    }
    return text;
}

}  // namespace emulator

using namespace emulator;

extern "C" {

void emulator_named_barrier(int barrier, int count, bool waits, Site site) {
    Call call = {barrier, count, waits, site};
    const auto check = [&call](bool allowed, const std::string& wanted) {
        if (!allowed) fail_thread("comes to " + describe(call) + ", but " + wanted);
    };
    check(barrier > 0 && barrier < BARRIERS, "named barriers are 1 to 15");
    check(count > 0 && count % WARP == 0 && static_cast<size_t>(count) <= threads.size(),
          "its threads are whole warps of 32, and its block has " +
              std::to_string(threads.size()));
    emulator_together(name_of(call), come, &call, site);
}

}  // extern "C"
