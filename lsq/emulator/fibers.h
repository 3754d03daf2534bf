// Fibers: functions with stacks of their own that run until they yield.
#pragma once

#include <cstddef>

#if !defined(__x86_64__)
#define EMULATOR_UCONTEXT
#endif

#ifdef EMULATOR_UCONTEXT
#include <ucontext.h>
#endif

namespace emulator {

class Fiber {
public:
    // The next resume() calls `entry` on an empty stack, abandoning earlier work. `entry` ends with
    // a yield. False: no memory is left for the stack.
    bool start(void (*entry)());

    // Runs the fiber until it yields. Not from within a fiber.
    void resume();

    // From within the fiber: back to resume().
    void yield();

    bool holds(const void* address) const;

    // Whether an address lies just beyond the stack.
    bool overflown(const void* address) const;

private:
    static void enter();

    unsigned char* stack_ = nullptr;
    void (*entry_)() = nullptr;
#ifdef EMULATOR_UCONTEXT
    ucontext_t own_, caller_;
#else
    void* own_ = nullptr;
    void* caller_ = nullptr;
#endif
};

}  // namespace emulator
