#include "fibers.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>

#ifdef LSQ_SANITIZE
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

namespace emulator {

namespace {

#ifdef LSQ_SANITIZE
constexpr size_t STACK = 512 * 1024;
#else
constexpr size_t STACK = 64 * 1024;
#endif

size_t page_size() { return static_cast<size_t>(sysconf(_SC_PAGESIZE)); }

// A stack above a protected page; null: no memory is left.
unsigned char* new_stack() {
    constexpr int FLAGS = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    void* memory = mmap(nullptr, STACK + page_size(), PROT_READ | PROT_WRITE, FLAGS, -1, 0);
    if (memory == MAP_FAILED) return nullptr;
    mprotect(memory, page_size(), PROT_NONE);
    return static_cast<unsigned char*>(memory) + page_size();
}

Fiber* running = nullptr;

#ifdef LSQ_SANITIZE
const void* caller_stack = nullptr;
size_t caller_size = 0;
#endif

// AddressSanitizer follows stacks: it must hear of switches.
inline void before_switch([[maybe_unused]] void** kept, [[maybe_unused]] const void* stack,
                          [[maybe_unused]] size_t size) {
#ifdef LSQ_SANITIZE
    __sanitizer_start_switch_fiber(kept, stack, size);
#endif
}

inline void after_switch([[maybe_unused]] void* kept, [[maybe_unused]] bool in_fiber) {
#ifdef LSQ_SANITIZE
    __sanitizer_finish_switch_fiber(kept, in_fiber ? &caller_stack : nullptr,
                                    in_fiber ? &caller_size : nullptr);
#endif
}

}  // namespace

#ifndef EMULATOR_UCONTEXT

// Saves the callee-saved registers and the stack pointer, and loads those of another stack.
extern "C" void emulator_switch(void** save, void* load);
asm(R"(
.text
.hidden emulator_switch
.globl emulator_switch
.type emulator_switch, @function
emulator_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
.size emulator_switch, . - emulator_switch
)");

#endif

void Fiber::enter() {
    after_switch(nullptr, true);
    running->entry_();
    __builtin_unreachable();
}

bool Fiber::start(void (*entry)()) {
    if (!stack_) stack_ = new_stack();
    if (!stack_) return false;
#ifdef LSQ_SANITIZE
    __asan_unpoison_memory_region(stack_, STACK);
#endif
    entry_ = entry;
#ifndef EMULATOR_UCONTEXT
    // Six saved registers, the address that emulator_switch returns to, and an unused return
    // address.
    void** top = reinterpret_cast<void**>(stack_ + STACK) - 8;
    for (int i = 0; i < 8; ++i) top[i] = nullptr;
    top[6] = reinterpret_cast<void*>(&Fiber::enter);
    own_ = top;
#else
    getcontext(&own_);
    own_.uc_stack.ss_sp = stack_;
    own_.uc_stack.ss_size = STACK;
    own_.uc_link = nullptr;
    makecontext(&own_, &Fiber::enter, 0);
#endif
    return true;
}

void Fiber::resume() {
    void* kept = nullptr;
    running = this;
    before_switch(&kept, stack_, STACK);
#ifndef EMULATOR_UCONTEXT
    emulator_switch(&caller_, own_);
#else
    swapcontext(&caller_, &own_);
#endif
    after_switch(kept, false);
}

void Fiber::yield() {
    void* kept = nullptr;
#ifdef LSQ_SANITIZE
    before_switch(&kept, caller_stack, caller_size);
#endif
#ifndef EMULATOR_UCONTEXT
    emulator_switch(&own_, caller_);
#else
    swapcontext(&own_, &caller_);
#endif
    after_switch(kept, true);
}

bool Fiber::holds(const void* address) const {
    return stack_ && address >= stack_ && address < stack_ + STACK;
}

bool Fiber::overflown(const void* address) const {
    return stack_ && address < stack_ && address >= stack_ - page_size();
}

}  // namespace emulator
