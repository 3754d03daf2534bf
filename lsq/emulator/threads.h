// The threads of the block that runs.
#pragma once

#include "scheduler.h"

namespace emulator {

enum class State { ready, barrier, collective, finished };

struct Thread {
    Index index;
    State state;

    // What it waits for, and where.
    const char* operation;
    Site site;

    // In a collective: what it brings and what it gets.
    Collective kind;
    uint32_t mask, value, source, result;
    void (*together)(void* const* operands);
    void* operands;
};

}  // namespace emulator
