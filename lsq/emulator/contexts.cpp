// libcuda's functions of results, devices and contexts. There are two devices.
#include "contexts.h"

#include <vector>

namespace emulator {

namespace {

constexpr int DEVICES = 2;
constexpr int CAPABILITY_MAJOR = 75;  // CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR
Context contexts[DEVICES] = {{0, nullptr}, {1, nullptr}};
thread_local std::vector<Context*> stack;
thread_local Failure last = {SUCCESS, ""};

bool exists(int device) { return device >= 0 && device < DEVICES; }

}  // namespace

Result remember(const Failure& failure) {
    last = failure;
    return failure.result;
}

std::recursive_mutex& driver_lock() {
    static std::recursive_mutex lock;
    return lock;
}

Context& current_context() {
    if (!stack.empty()) return *stack.back();
    fail(INVALID_CONTEXT,
         "no context is current in this thread; make one current first (cuCtxPushCurrent)");
}

}  // namespace emulator

using namespace emulator;

DRIVER cuGetErrorName(int result, const char** name) {
    *name = nullptr;
    switch (result) {
        case SUCCESS: *name = "CUDA_SUCCESS"; break;
#define EMULATOR_CASE(result, number, cuda) \
    case result: *name = "CUDA_ERROR_" #cuda; break;
            EMULATOR_RESULTS(EMULATOR_CASE)
#undef EMULATOR_CASE
    }
    return *name ? SUCCESS : INVALID_VALUE;
}

// The message of this thread's last failure if it had `result`, else the name of the result.
DRIVER cuGetErrorString(int result, const char** message) {
    const int known = cuGetErrorName(result, message);
    if (result == last.result && result != SUCCESS) *message = last.message.c_str();
    return known;
}

DRIVER cuDeviceGet(int* device, int ordinal) {
    if (!exists(ordinal)) return INVALID_DEVICE;
    *device = ordinal;
    return SUCCESS;
}

DRIVER cuDeviceGetAttribute(int* value, int attribute, int device) {
    if (!exists(device)) return INVALID_DEVICE;
    if (attribute != CAPABILITY_MAJOR) return INVALID_VALUE;
    *value = 9;  // the kernels of every capability run here; launches have what only this one has
    return SUCCESS;
}

DRIVER cuDevicePrimaryCtxRetain(Context** context, int device) {
    if (!exists(device)) return INVALID_DEVICE;
    *context = &contexts[device];
    return SUCCESS;
}

DRIVER cuCtxGetCurrent(Context** context) {
    *context = stack.empty() ? nullptr : stack.back();
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

// Replaces the top of the stack; null only removes it.
DRIVER cuCtxSetCurrent(Context* context) {
    if (!stack.empty()) stack.pop_back();
    if (context) stack.push_back(context);
    return SUCCESS;
}

const void* emulator_context() {
    if (stack.empty()) stack.push_back(&contexts[0]);
    return stack.back();
}

const char* emulator_message() { return last.message.c_str(); }
