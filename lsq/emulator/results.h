// What the functions of libcuda return, and the words about it.
#pragma once

#include <mutex>
#include <string>

#include "services.h"

#define DRIVER extern "C" EMULATOR_VISIBLE int

namespace emulator {

// With the numbers of cuda.h.
enum Result : int {
    SUCCESS = 0,
    INVALID_VALUE = 1,
    OUT_OF_MEMORY = 2,
    INVALID_DEVICE = 101,
    INVALID_IMAGE = 200,
    INVALID_CONTEXT = 201,
    INVALID_HANDLE = 400,
    ILLEGAL_STATE = 401,
    NOT_FOUND = 500,
    LAUNCH_FAILED = 719,
    NOT_SUPPORTED = 801,
    CAPTURE_UNSUPPORTED = 900,
    CAPTURE_INVALIDATED = 901,
    CAPTURE_MERGE = 902,
    CAPTURE_UNMATCHED = 903,
    CAPTURE_UNJOINED = 904,
    CAPTURE_ISOLATION = 905,
    CAPTURE_IMPLICIT = 906,
    CAPTURED_EVENT = 907,
    CAPTURE_WRONG_THREAD = 908,
};

// Keeps the words for cuGetErrorString in this thread; returns `result`.
int fail(int result, const std::string& message);

// The words about this thread's last failure.
const std::string& last_message();

// Every function of the driver that looks at contexts, streams, events or memory holds it.
std::recursive_mutex& driver_lock();

#define HOLD_DRIVER const std::lock_guard<std::recursive_mutex> hold_driver(emulator::driver_lock())

}  // namespace emulator
