// Calls of the emulated libcublasLt.
#pragma once

#define LSQ_EXPORT extern "C" __attribute__((visibility("default")))

namespace emulator {

// Counts a call; the status that it was told to fail with, or kSuccess.
int called(const char* function);

}  // namespace emulator
