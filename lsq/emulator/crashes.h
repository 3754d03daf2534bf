// Signals that a kernel raises: illegal accesses, divisions by zero, abort.
#pragma once

#include <csignal>
#include <string>

namespace emulator {

struct Crash {
    int signal = 0;  // 0: none
    void* address = nullptr;
};

// Whether the thread that has a CrashGuard is in a kernel now; a crash elsewhere is not the
// kernel's.
extern volatile std::sig_atomic_t in_kernel;

// While it lives, a crash of this thread in a kernel calls `leave`, on a stack of its own, which
// must not return. All other crashes go where they went before. Under the sanitizers it does
// nothing: they report and end the process.
class CrashGuard {
public:
    explicit CrashGuard(void (*leave)(Crash));
    ~CrashGuard();
    CrashGuard(const CrashGuard&) = delete;
    CrashGuard& operator=(const CrashGuard&) = delete;
};

// "calls abort (SIGABRT)"
std::string describe(const Crash& crash);

}  // namespace emulator
