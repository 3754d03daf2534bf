// The functions of libcuda about devices, contexts, and the order of streams. There are two devices, each with its
// primary context. A launch has finished when cuLaunchKernel returns, so events and waits for them do nothing.
#include "contexts.h"

#include <vector>

#include "services.h"

namespace {

// Results, with the numbers of cuda.h.
constexpr int SUCCESS = 0;
constexpr int INVALID_DEVICE = 101;
constexpr int INVALID_CONTEXT = 201;

constexpr int DEVICES = 2;
emulator::Context contexts[DEVICES] = {{0}, {1}};
thread_local std::vector<emulator::Context*> stack;

}  // namespace

namespace emulator {

Context* current_context() { return stack.empty() ? nullptr : stack.back(); }

}  // namespace emulator

extern "C" {

#define DRIVER EMULATOR_VISIBLE int

DRIVER cuDeviceGet(int* device, int ordinal) {
    if (ordinal < 0 || ordinal >= DEVICES) return INVALID_DEVICE;
    *device = ordinal;
    return SUCCESS;
}

DRIVER cuDevicePrimaryCtxRetain(emulator::Context** context, int device) {
    if (device < 0 || device >= DEVICES) return INVALID_DEVICE;
    *context = &contexts[device];
    return SUCCESS;
}

DRIVER cuCtxGetCurrent(emulator::Context** context) {
    *context = emulator::current_context();
    return SUCCESS;
}

DRIVER cuCtxPushCurrent_v2(emulator::Context* context) {
    if (!context) return INVALID_CONTEXT;
    stack.push_back(context);
    return SUCCESS;
}

DRIVER cuCtxPopCurrent_v2(emulator::Context** context) {
    if (stack.empty()) return INVALID_CONTEXT;
    if (context) *context = stack.back();
    stack.pop_back();
    return SUCCESS;
}

// Replaces the top of the stack; null empties the place.
DRIVER cuCtxSetCurrent(emulator::Context* context) {
    if (!stack.empty()) stack.pop_back();
    if (context) stack.push_back(context);
    return SUCCESS;
}

DRIVER cuEventCreate(void** event, unsigned) {
    if (!emulator::current_context()) return INVALID_CONTEXT;
    *event = new char;
    return SUCCESS;
}

DRIVER cuEventDestroy_v2(void* event) {
    delete static_cast<char*>(event);
    return SUCCESS;
}

DRIVER cuEventRecord(void*, void*) { return emulator::current_context() ? SUCCESS : INVALID_CONTEXT; }

DRIVER cuStreamWaitEvent(void*, void*, unsigned) { return emulator::current_context() ? SUCCESS : INVALID_CONTEXT; }

DRIVER cuStreamIsCapturing(void*, int* capturing) {
    *capturing = 0;
    return emulator::current_context() ? SUCCESS : INVALID_CONTEXT;
}

}  // extern "C"
