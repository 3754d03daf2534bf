// Runs the loops of several operations in one call.
#include <cstdint>

using Loop = void (*)(const void* operation);

extern "C" __attribute__((visibility("default"))) void lsq_run_sequence(
    const Loop* loops, const void* const* operations, int64_t count) {
    for (int64_t i = 0; i < count; ++i) loops[i](operations[i]);
}
