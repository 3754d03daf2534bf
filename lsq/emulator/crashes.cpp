#include "crashes.h"

#include <pthread.h>

#include <iterator>

#include "report.h"

namespace emulator {

volatile std::sig_atomic_t in_kernel = 0;

namespace {

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

}  // namespace

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

namespace {

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

}  // namespace

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

}  // namespace emulator
