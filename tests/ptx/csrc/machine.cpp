// Runs launches.
#include "machine.h"

#include <algorithm>
#include <numeric>
#include <random>

namespace ptx {
namespace {

constexpr uint32_t kMostSteps = 20'000'000;  // of a thread

std::string place(const Thread& thread, const Instruction& at) {
    const Block& block = *thread.block;
    std::string words = block.kernel.name + ", block";
    for (const uint32_t index : block.index) words += " " + std::to_string(index);
    return words + ", thread " + std::to_string(thread.number) + ", line " +
           std::to_string(at.statement->line) + " (" + at.statement->text.substr(0, 120) + ")";
}

std::string name_of(const Thread& thread, int slot) {
    const auto& registers = thread.block->kernel.text->registers;
    return slot < static_cast<int>(registers.size()) ? registers[slot].name : "a constant";
}

// The slot that mov or selp copies.
int source_of(const Thread& thread, const Instruction& i) {
    return i.c < 0 || (thread.r[i.c] & 1) ? i.a : i.b;
}

void check_registers(Thread& thread, const Instruction& i) {
    if (i.copies && thread.written[source_of(thread, i)] == kInFlight)
        fault(thread, i, "it copies a register of wgmma, which has not been waited for");
    for (const int slot : i.reads) {
        const uint32_t step = thread.written[slot];
        if (step == kUnset)
            fault(thread, i, name_of(thread, slot) + " is read, but nothing has written it");
        if (step == kInFlight)
            fault(thread, i, name_of(thread, slot) + " is read, but wgmma has not been waited for");
    }
    if (!thread.flights) return;
    for (const int slot : i.writes)
        if (thread.written[slot] == kInFlight)
            fault(thread, i,
                  name_of(thread, slot) + " is written, but wgmma has not been waited for");
}

// Until it ends or waits.
void run(Thread& thread) {
    const std::vector<Instruction>& code = thread.block->kernel.code;
    while (thread.state == State::RUNNING) {
        const Instruction& i = code[thread.at++];
        if (++thread.steps >= kMostSteps) fault(thread, i, "the thread does not end");
        if (i.guard >= 0) {
            if (thread.written[i.guard] == kUnset)
                fault(thread, i, name_of(thread, i.guard) + " is read, but nothing has written it");
            if ((thread.r[i.guard] & 1) == i.negated) continue;
        }
        check_registers(thread, i);
        // Before it runs: with the last thread of several, the others' registers are written, too.
        const bool known = !i.copies || thread.written[source_of(thread, i)] != kUnset;
        for (const int slot : i.writes) thread.written[slot] = known ? thread.steps : kUnset;
        i.run(thread, i);
    }
}

}  // namespace

void fault(const Thread& thread, const Instruction& at, const std::string& what) {
    throw Error(place(thread, at) + ": " + what);
}

Block::Block(const Launch& launch, int number)
    : launch(launch), kernel(*launch.kernel), number(number),
      index{number % launch.grid[0], number / launch.grid[0] % launch.grid[1],
            number / launch.grid[0] / launch.grid[1]} {
    const uint32_t* size = launch.block;
    const uint64_t dynamic = (kSharedFirst + kernel.shared_bytes + kernel.dynamic_align - 1) /
                             kernel.dynamic_align * kernel.dynamic_align;
    const size_t bytes =
        launch.dynamic_bytes ? dynamic + launch.dynamic_bytes - kSharedFirst : kernel.shared_bytes;
    threads.resize(size[0] * size[1] * size[2]);
    warps.resize((threads.size() + kWarp - 1) / kWarp);
    shared.bytes.assign(bytes, 0xa5);
    shared.touched.resize(bytes);
    shared.read.resize(bytes * warps.size());
    for (size_t number = 0; number < warps.size(); ++number) {
        warps[number].block = this;
        warps[number].number = static_cast<int>(number);
        warps[number].clock.resize(warps.size());
        warps[number].clock[number] = 1;
    }
    const size_t registers = kernel.text->registers.size();
    for (size_t number = 0; number < threads.size(); ++number) {
        Thread& thread = threads[number];
        thread.block = this;
        thread.warp = &warps[number / kWarp];
        thread.number = static_cast<int>(number);
        thread.lane = static_cast<int>(number % kWarp);
        thread.warp->lanes[thread.lane] = &thread;
        thread.warp->live |= 1u << thread.lane;
        thread.local.assign(kernel.local_bytes, 0xa5);
        thread.r.assign(kernel.slots, 0x5a5a5a5a5a5a5a5aull);
        thread.written.assign(kernel.slots, kUnset);
        std::copy(kernel.constants.begin(), kernel.constants.end(), thread.r.begin() + registers);
        std::fill(thread.written.begin() + registers, thread.written.end(), 1);
        if (kernel.dynamic_constant >= 0) thread.r[kernel.dynamic_constant] = dynamic;
        const auto special = [&thread](int slot, uint64_t value) {
            thread.r[slot] = value, thread.written[slot] = 1;
        };
        const uint64_t of_block[3] = {number % size[0], number / size[0] % size[1],
                                      number / size[0] / size[1]};
        for (int axis = 0; axis < 3; ++axis) {
            special(TID + axis, of_block[axis]);
            special(NTID + axis, size[axis]);
            special(CTAID + axis, index[axis]);
            special(NCTAID + axis, launch.grid[axis]);
        }
        special(LANEID, thread.lane);
        special(WARPID, number / kWarp);
    }
}

// Threads in order, backwards (1), or in a random order (another number).
void Block::run() {
    std::vector<size_t> turns(threads.size());
    std::iota(turns.begin(), turns.end(), size_t{0});
    if (launch.order == 1) std::reverse(turns.begin(), turns.end());
    if (launch.order > 1) std::shuffle(turns.begin(), turns.end(), std::mt19937(launch.order));
    while (true) {
        bool ran = false, left = false;
        for (const size_t turn : turns) {
            Thread& thread = threads[turn];
            if (thread.state == State::RUNNING) ptx::run(thread), ran = true;
            left |= thread.state != State::EXITED;
        }
        if (!left) break;
        if (!ran) deadlock();
    }
    for (const auto& [number, barrier] : barriers) {
        if (!barrier.arrived) continue;
        fault(threads.front(), kernel.code.back(),
              "the block ends when " + std::to_string(barrier.arrived) + " of " +
                  std::to_string(barrier.wanted) + " threads have come to barrier " +
                  std::to_string(number));
    }
    for (const Warp& warp : warps) {
        if (warp.products == warps[warp.number / 4 * 4].products) continue;
        const Thread& thread = *warp.lanes[0];
        fault(thread, kernel.code.back(),
              "the warps of its warpgroup have not begun the same products by wgmma");
    }
}

// Names the first thread that waits, and one that is elsewhere.
void Block::deadlock() const {
    const Thread* first = nullptr;
    for (const Thread& thread : threads)
        if (thread.state == State::WAITING && !first) first = &thread;
    std::map<std::string, int> elsewhere;
    for (const Thread& thread : threads) {
        if (thread.waits == first->waits && thread.mask == first->mask) continue;
        const bool ended = thread.state == State::EXITED;
        ++elsewhere[ended ? "have ended"
                          : "wait at line " + std::to_string(thread.waits->statement->line) + " (" +
                                thread.waits->statement->text.substr(0, 60) + ")"];
    }
    std::string words = "waits for ever";
    for (const auto& [where, count] : elsewhere)
        words += "; " + std::to_string(count) + " of the block's threads " + where;
    fault(*first, *first->waits, words);
}

}  // namespace ptx
