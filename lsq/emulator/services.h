// What compiled kernels call in the emulated driver library, and libraries beside it, such as the
// emulated libcublasLt.
#pragma once

#include <stddef.h>
#include <stdint.h>

#ifdef LSQ_SANITIZE
// Sanitized kernels are compiled with -fwhole-program.
#define EMULATOR_VISIBLE __attribute__((visibility("default"), externally_visible))
#else
#define EMULATOR_VISIBLE __attribute__((visibility("default")))
#endif

namespace emulator {

// A line of a source file, for messages.
struct Site {
    const char* file;
    int line;
};

// The shared variables of a module: all its writable memory that starts as zeros.
struct Memory {
    unsigned char* begin;
    unsigned char* end;
};

// What the lanes of a warp exchange.
enum class Collective { synchronize, ballot, shuffle, together };

constexpr size_t LARGEST_SHARED = 227 * 1024;

}  // namespace emulator

extern "C" {

EMULATOR_VISIBLE extern unsigned char emulator_dynamic_shared[];

// Returns when every thread of the block has called it.
EMULATOR_VISIBLE void emulator_barrier(emulator::Site site);

// Returns when every lane of `mask` has called it with the same mask and kind. ballot: the lanes
// whose value is not 0; shuffle: the value of lane `source`; synchronize: 0. `name` is for
// messages.
EMULATOR_VISIBLE uint32_t emulator_collective(emulator::Collective kind, const char* name,
                                              uint32_t mask, uint32_t value, uint32_t source,
                                              emulator::Site site);

// Returns when all 32 lanes of the warp have called it with the same `operation`, which has then
// run once for all of them: on the `operands` of each lane.
EMULATOR_VISIBLE void emulator_together(const char* name, void (*operation)(void* const* operands),
                                        void* operands, emulator::Site site);

// The index in its warp of the thread that runs.
EMULATOR_VISIBLE uint32_t emulator_lane();

// An atomic operation on memory: no race between the warps of a launch, but between launches that
// nothing orders.
EMULATOR_VISIBLE void emulator_atomic(const void* address, size_t size);

// The thread that runs reads or writes a vector, by an instruction that stands before `site`.
EMULATOR_VISIBLE void emulator_read(const void* address, size_t size, const void* site);
EMULATOR_VISIBLE void emulator_write(const void* address, size_t size, const void* site);

// Ends the launch where memory is not the block's shared memory; `name` is for messages.
EMULATOR_VISIBLE void emulator_check_shared(const void* address, size_t size, const char* name,
                                            emulator::Site site);

// Begins to copy 4, 8 or 16 bytes to shared memory, or zeros, by an instruction that stands before
// `place`.
EMULATOR_VISIBLE void emulator_copy(void* to, const void* from, size_t size, bool zeros,
                                    const void* place, emulator::Site site);

// The copies that the thread has begun since the last call are a group.
EMULATOR_VISIBLE void emulator_commit_copies();

// Returns when all but the newest `groups` groups of the thread have arrived.
EMULATOR_VISIBLE void emulator_wait_copies(size_t groups);

// What the thread has written to shared memory is there for multiplications that begin after a
// barrier.
EMULATOR_VISIBLE void emulator_fence_shared();

// What a descriptor of a matrix names an address in dynamic shared memory by.
EMULATOR_VISIBLE uint32_t emulator_shared_address(const void* address);

// The thread may begin multiplications of sums that it has touched before. All lanes of the warp
// call this and the next three.
EMULATOR_VISIBLE void emulator_fence_warpgroup(emulator::Site site);

// Begins sums += a [64, 32] times b [columns, 32] transposed, int8 in shared memory, of which
// `place` int32 [columns / 8, 4] are the thread's: they are rubbish until it has waited.
EMULATOR_VISIBLE void emulator_begin_multiplication(int32_t* place, uint32_t columns, uint64_t a,
                                                    uint64_t b, emulator::Site site);

// The multiplications that the thread has begun since the last call are a group.
EMULATOR_VISIBLE void emulator_commit_multiplications(emulator::Site site);

// Returns when all but the newest `groups` groups of multiplications are done.
EMULATOR_VISIBLE void emulator_wait_multiplications(size_t groups, emulator::Site site);

// Ends the launch: `address` is no multiple of `alignment`.
[[noreturn]] EMULATOR_VISIBLE void emulator_misaligned(const void* address, size_t alignment,
                                                       emulator::Site site);

// Ends the launch, because the two indices in a group of four, two bits each, are not in order.
[[noreturn]] EMULATOR_VISIBLE void emulator_unordered(uint32_t places, emulator::Site site);

// For libraries:

// Does work on a stream of the current context, now or, where the stream is captured, with each
// launch of the graph. It gets a copy of `data`, and returns what went wrong in words, or null.
// Returns a result of the driver, a failure where `context`, to which the library belongs, is not
// the current one.
EMULATOR_VISIBLE int emulator_submit(const void* context, const void* stream, const char* what,
                                     const char* (*work)(const void* data), const void* data,
                                     size_t bytes);

// Within such work: it touches memory of the device. What is wrong with that in words, valid until
// the next call, or null.
EMULATOR_VISIBLE const char* emulator_use(const void* address, size_t bytes, int writes);

// The context that is current in this thread. As CUDA's runtime does, a thread without one gets
// that of the first device.
EMULATOR_VISIBLE const void* emulator_context();

// What went wrong in this thread's last call that failed.
EMULATOR_VISIBLE const char* emulator_message();

}  // extern "C"
