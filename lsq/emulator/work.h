// How libraries beside the driver, such as the emulated libcublasLt, do their work on its streams.
#pragma once

#include "services.h"

extern "C" {

// Does work on a stream of the current context, now or, where the stream is captured, with each launch of the graph.
// It gets a copy of `data`, and returns what went wrong in words, or null. Returns a result of the driver, a failure where
// `context`, to which the library belongs, is not the current one.
EMULATOR_VISIBLE int emulator_submit(const void* context, const void* stream, const char* what,
                                     const char* (*work)(const void* data), const void* data, size_t bytes);

// Within such work: it touches memory of the device. What is wrong with that in words, valid until the next call, or null.
EMULATOR_VISIBLE const char* emulator_use(const void* address, size_t bytes, int writes);

// The context that is current in this thread. As CUDA's runtime does, a thread without one gets that of the first device.
EMULATOR_VISIBLE const void* emulator_context();

// What went wrong in this thread's last call that failed.
EMULATOR_VISIBLE const char* emulator_message();

}  // extern "C"
