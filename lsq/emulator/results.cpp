#include "results.h"

namespace emulator {

namespace {

thread_local std::string message_;
thread_local int failure_ = SUCCESS;

const char* name_of(int result) {
    switch (result) {
        case SUCCESS: return "CUDA_SUCCESS";
        case INVALID_VALUE: return "CUDA_ERROR_INVALID_VALUE";
        case OUT_OF_MEMORY: return "CUDA_ERROR_OUT_OF_MEMORY";
        case INVALID_DEVICE: return "CUDA_ERROR_INVALID_DEVICE";
        case INVALID_IMAGE: return "CUDA_ERROR_INVALID_IMAGE";
        case INVALID_CONTEXT: return "CUDA_ERROR_INVALID_CONTEXT";
        case INVALID_HANDLE: return "CUDA_ERROR_INVALID_HANDLE";
        case ILLEGAL_STATE: return "CUDA_ERROR_ILLEGAL_STATE";
        case NOT_FOUND: return "CUDA_ERROR_NOT_FOUND";
        case LAUNCH_FAILED: return "CUDA_ERROR_LAUNCH_FAILED";
        case NOT_SUPPORTED: return "CUDA_ERROR_NOT_SUPPORTED";
        case CAPTURE_UNSUPPORTED: return "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED";
        case CAPTURE_INVALIDATED: return "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED";
        case CAPTURE_MERGE: return "CUDA_ERROR_STREAM_CAPTURE_MERGE";
        case CAPTURE_UNMATCHED: return "CUDA_ERROR_STREAM_CAPTURE_UNMATCHED";
        case CAPTURE_UNJOINED: return "CUDA_ERROR_STREAM_CAPTURE_UNJOINED";
        case CAPTURE_ISOLATION: return "CUDA_ERROR_STREAM_CAPTURE_ISOLATION";
        case CAPTURE_IMPLICIT: return "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT";
        case CAPTURED_EVENT: return "CUDA_ERROR_CAPTURED_EVENT";
        case CAPTURE_WRONG_THREAD: return "CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD";
    }
    return nullptr;
}

}  // namespace

int fail(int result, const std::string& message) {
    failure_ = result;
    message_ = message;
    return result;
}

const std::string& last_message() { return message_; }

std::recursive_mutex& driver_lock() {
    static std::recursive_mutex lock;
    return lock;
}

}  // namespace emulator

DRIVER cuGetErrorName(int result, const char** name) {
    *name = emulator::name_of(result);
    return *name ? emulator::SUCCESS : emulator::INVALID_VALUE;
}

// What went wrong in this thread's last call that failed with `result`; only the name of any other.
DRIVER cuGetErrorString(int result, const char** message) {
    const int found = cuGetErrorName(result, message);
    if (result == emulator::failure_ && result != emulator::SUCCESS) *message = emulator::message_.c_str();
    return found;
}
