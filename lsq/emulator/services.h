// Functions of the emulated driver for compiled kernels and libraries such as the emulated
// libcublasLt.
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

// A module's shared variables: all its writable memory that starts as zeros.
struct Memory {
    unsigned char* begin;
    unsigned char* end;
};

enum class Collective { synchronize, ballot, shuffle, together };

constexpr size_t LARGEST_SHARED = 227 * 1024;

}  // namespace emulator

extern "C" {

EMULATOR_VISIBLE extern unsigned char emulator_dynamic_shared[];

// Returns when every thread of the block has called it.
EMULATOR_VISIBLE void emulator_barrier(emulator::Site site);

// Comes with all lanes of the warp to a named barrier, 1 to 15, of `count` threads. `waits`:
// returns when so many have come.
EMULATOR_VISIBLE void emulator_named_barrier(int barrier, int count, bool waits,
                                             emulator::Site site);

// Returns when every lane of `mask` has called it with the same mask and kind. ballot: the lanes
// whose value is not 0; shuffle: the value of lane `source`; synchronize: 0.
EMULATOR_VISIBLE uint32_t emulator_collective(emulator::Collective kind, const char* name,
                                              uint32_t mask, uint32_t value, uint32_t source,
                                              emulator::Site site);

// Returns when all 32 lanes of the warp have called it and `operation` has run once, on the
// `operands` of each lane.
EMULATOR_VISIBLE void emulator_together(const char* name, void (*operation)(void* const* operands),
                                        void* operands, emulator::Site site);

// The running thread's index in its warp.
EMULATOR_VISIBLE uint32_t emulator_lane();

// An atomic operation: a race only between unordered launches.
EMULATOR_VISIBLE void emulator_atomic(const void* address, size_t size);

// The running thread reads or writes a vector, by an instruction before `site`.
EMULATOR_VISIBLE void emulator_read(const void* address, size_t size, const void* site);
EMULATOR_VISIBLE void emulator_write(const void* address, size_t size, const void* site);

// Ends the launch unless memory is the block's shared memory.
EMULATOR_VISIBLE void emulator_check_shared(const void* address, size_t size, const char* name,
                                            emulator::Site site);

// Begins to copy 4, 8 or 16 bytes or zeros to shared memory, by an instruction before
// `instruction`.
EMULATOR_VISIBLE void emulator_copy(void* to, const void* from, size_t size, bool zeros,
                                    const void* instruction, emulator::Site site);

// Makes the thread's copies since the last call a group.
EMULATOR_VISIBLE void emulator_commit_copies();

// Waits for all but the newest `groups` groups of the thread.
EMULATOR_VISIBLE void emulator_wait_copies(size_t groups);

// Shows the thread's writes to shared memory to multiplications after a barrier.
EMULATOR_VISIBLE void emulator_fence_shared();

// An address in dynamic shared memory, as descriptors of matrices have it.
EMULATOR_VISIBLE uint32_t emulator_shared_address(const void* address);

// Lets the thread multiply sums that it has touched. All lanes of the warp call this and the next
// three.
EMULATOR_VISIBLE void emulator_fence_warpgroup(emulator::Site site);

// Begins sums += a [64, 32] times b [columns, 32] transposed, int8 in shared memory. `registers`
// int32 [columns / 8, 4]: the thread's sums, rubbish until it has waited.
EMULATOR_VISIBLE void emulator_begin_multiplication(int32_t* registers, uint32_t columns,
                                                    uint64_t a, uint64_t b, emulator::Site site);

// Makes the thread's multiplications since the last call a group.
EMULATOR_VISIBLE void emulator_commit_multiplications(emulator::Site site);

// Waits for all but the newest `groups` groups of multiplications.
EMULATOR_VISIBLE void emulator_wait_multiplications(size_t groups, emulator::Site site);

// Ends the launch: `address` is misaligned.
[[noreturn]] EMULATOR_VISIBLE void emulator_misaligned(const void* address, size_t alignment,
                                                       emulator::Site site);

// Ends the launch: two 2-bit indices of a group of four are not in order.
[[noreturn]] EMULATOR_VISIBLE void emulator_unordered(uint32_t indices, emulator::Site site);

// For libraries:

// Does work on a stream of the current context, now or, if captured, in each launch of the graph.
// It gets a copy of `data` and returns its fault in words, or null. -> the driver's result, a
// failure unless `context`, the library's, is current
EMULATOR_VISIBLE int emulator_submit(const void* context, const void* stream, const char* what,
                                     const char* (*work)(const void* data), const void* data,
                                     size_t bytes);

// Within such work: uses memory of the device. -> its fault, valid until the next call, or null
EMULATOR_VISIBLE const char* emulator_use(const void* address, size_t bytes, int writes);

// The current context of this thread; as in CUDA's runtime, that of the first device by default.
EMULATOR_VISIBLE const void* emulator_context();

// Message of this thread's last failure.
EMULATOR_VISIBLE const char* emulator_message();

}  // extern "C"
