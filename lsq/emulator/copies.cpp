// A GPU may write what is copied at any time between the copy's begin and the wait: here its source is read at the begin,
// and its destination is written at the wait, so that who does not wait finds what was there before. races.cpp reports
// everybody who touches the destination meanwhile.
#include "copies.h"

#include <cstdint>
#include <cstring>
#include <deque>
#include <vector>

#include "races.h"
#include "scheduler.h"

namespace emulator {

namespace {

struct Copy {
    unsigned char* to;
    size_t size;
    unsigned char bytes[16];
};

using Group = std::vector<Copy>;

struct Copies {
    Group open;                    // belong to no group yet
    std::deque<Group> under_way;  // the oldest first
};

Copies of_threads[1024];

}  // namespace

BlockCopies::~BlockCopies() {
    for (Copies& copies : of_threads) {
        copies.under_way.push_back(std::move(copies.open));
        for (const Group& group : copies.under_way) {
            for (const Copy& copy : group) end_copy(copy.to, copy.size);
        }
        copies = {};
    }
}

}  // namespace emulator

extern "C" {

void emulator_copy(void* to, const void* from, size_t size, bool zeros, const void* place, emulator::Site site) {
    using namespace emulator;
    for (const void* address : {static_cast<const void*>(to), from}) {
        if (reinterpret_cast<uintptr_t>(address) % size) emulator_misaligned(address, size, site);
    }
    emulator_check_shared(to, size, "cp.async", site);
    if (!zeros) emulator_read(from, size, place);
    begin_copy(to, size, static_cast<const char*>(place) + 1);  // an access of its own for those who count
    Copy copy = {static_cast<unsigned char*>(to), size, {}};
    if (!zeros) std::memcpy(copy.bytes, from, size);
    of_threads[running_thread()].open.push_back(copy);
}

void emulator_commit_copies() {
    emulator::Copies& copies = emulator::of_threads[emulator::running_thread()];
    copies.under_way.push_back(std::move(copies.open));
    copies.open.clear();
}

void emulator_wait_copies(size_t groups) {
    emulator::Copies& copies = emulator::of_threads[emulator::running_thread()];
    for (; copies.under_way.size() > groups; copies.under_way.pop_front()) {
        for (const emulator::Copy& copy : copies.under_way.front()) {
            std::memcpy(copy.to, copy.bytes, copy.size);
            emulator::end_copy(copy.to, copy.size);
        }
    }
}

}  // extern "C"
