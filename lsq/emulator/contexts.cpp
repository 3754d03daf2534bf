// The functions of libcuda about devices and contexts. There are two devices, each with its primary context, which lives
// as long as the process.
#include "contexts.h"

#include <vector>

#include "results.h"
#include "streams.h"
#include "work.h"

namespace {

constexpr int DEVICES = 2;
emulator::Context contexts[DEVICES] = {{0, nullptr}, {1, nullptr}};
thread_local std::vector<emulator::Context*> stack;

bool exists(int device) { return device >= 0 && device < DEVICES; }

}  // namespace

namespace emulator {

Context* current_context() { return stack.empty() ? nullptr : stack.back(); }

int find_context(Context*& context) {
    context = current_context();
    if (context) return SUCCESS;
    return fail(INVALID_CONTEXT, "no context is current in this thread; make one current first (cuCtxPushCurrent)");
}

std::string of_device(int device) { return device ? " of device " + std::to_string(device) : ""; }

}  // namespace emulator

using namespace emulator;

DRIVER cuDeviceGetCount(int* count) {
    *count = DEVICES;
    return SUCCESS;
}

DRIVER cuDeviceGet(int* device, int ordinal) {
    if (!exists(ordinal)) return INVALID_DEVICE;
    *device = ordinal;
    return SUCCESS;
}

DRIVER cuDevicePrimaryCtxRetain(Context** context, int device) {
    if (!exists(device)) return INVALID_DEVICE;
    *context = &contexts[device];
    return SUCCESS;
}

DRIVER cuDevicePrimaryCtxRelease_v2(int device) { return exists(device) ? SUCCESS : INVALID_DEVICE; }

DRIVER cuCtxGetCurrent(Context** context) {
    *context = current_context();
    return SUCCESS;
}

DRIVER cuCtxGetDevice(int* device) {
    Context* context;
    if (const int refused = find_context(context)) return refused;
    *device = context->device;
    return SUCCESS;
}

DRIVER cuCtxPushCurrent_v2(Context* context) {
    if (!context) return INVALID_CONTEXT;
    stack.push_back(context);
    return SUCCESS;
}

DRIVER cuCtxPopCurrent_v2(Context** context) {
    if (stack.empty()) return INVALID_CONTEXT;
    if (context) *context = stack.back();
    stack.pop_back();
    return SUCCESS;
}

// Replaces the top of the stack; null empties the place.
DRIVER cuCtxSetCurrent(Context* context) {
    if (!stack.empty()) stack.pop_back();
    if (context) stack.push_back(context);
    return SUCCESS;
}

// The host waits for all streams of the current context.
DRIVER cuCtxSynchronize() {
    HOLD_DRIVER;
    Context* context;
    if (const int refused = find_context(context)) return refused;
    return synchronize(*context);
}

const void* emulator_context() {
    if (stack.empty()) stack.push_back(&contexts[0]);
    return stack.back();
}
