// Results of the driver's functions, and the contexts of the emulated devices.
#pragma once

#include <memory>
#include <mutex>
#include <string>

#include "services.h"

#define DRIVER extern "C" EMULATOR_VISIBLE int

namespace emulator {

// Failures and their numbers in cuda.h.
#define EMULATOR_RESULTS(result) \
    result(INVALID_VALUE, 1, INVALID_VALUE) \
    result(OUT_OF_MEMORY, 2, OUT_OF_MEMORY) \
    result(INVALID_DEVICE, 101, INVALID_DEVICE) \
    result(INVALID_IMAGE, 200, INVALID_IMAGE) \
    result(INVALID_CONTEXT, 201, INVALID_CONTEXT) \
    result(INVALID_HANDLE, 400, INVALID_HANDLE) \
    result(ILLEGAL_STATE, 401, ILLEGAL_STATE) \
    result(NOT_FOUND, 500, NOT_FOUND) \
    result(LAUNCH_FAILED, 719, LAUNCH_FAILED) \
    result(NOT_SUPPORTED, 801, NOT_SUPPORTED) \
    result(CAPTURE_UNSUPPORTED, 900, STREAM_CAPTURE_UNSUPPORTED) \
    result(CAPTURE_INVALIDATED, 901, STREAM_CAPTURE_INVALIDATED) \
    result(CAPTURE_MERGE, 902, STREAM_CAPTURE_MERGE) \
    result(CAPTURE_UNMATCHED, 903, STREAM_CAPTURE_UNMATCHED) \
    result(CAPTURE_UNJOINED, 904, STREAM_CAPTURE_UNJOINED) \
    result(CAPTURE_ISOLATION, 905, STREAM_CAPTURE_ISOLATION) \
    result(CAPTURE_IMPLICIT, 906, STREAM_CAPTURE_IMPLICIT) \
    result(CAPTURED_EVENT, 907, CAPTURED_EVENT) \
    result(CAPTURE_WRONG_THREAD, 908, STREAM_CAPTURE_WRONG_THREAD)

enum Result : int {
    SUCCESS = 0,
#define EMULATOR_ENUMERATOR(name, number, cuda) name = number,
    EMULATOR_RESULTS(EMULATOR_ENUMERATOR)
#undef EMULATOR_ENUMERATOR
};

// Ends the running function of the driver; cuGetErrorString returns the message in this thread.
struct Failure {
    Result result;
    std::string message;
};

[[noreturn]] inline void fail(Result result, const std::string& message) {
    throw Failure{result, message};
}

Result remember(const Failure& failure);
std::recursive_mutex& driver_lock();

// Runs the body of a function of the driver; at most one runs in the process.
template <typename Body>
int guarded(const Body& body) {
    const std::lock_guard<std::recursive_mutex> hold(driver_lock());
    try {
        body();
        return SUCCESS;
    } catch (const Failure& failure) {
        return remember(failure);
    }
}

struct Stream;

// The driver's CUcontext: the primary context of a device, which lives as long as the process.
struct Context {
    int device;
    std::shared_ptr<Stream> null_stream;  // made when it is first wanted
};

// The context that is current in this thread; fails if there is none.
Context& current_context();

}  // namespace emulator
