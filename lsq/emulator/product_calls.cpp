#include "product_calls.h"

#include <cstdint>
#include <map>
#include <mutex>
#include <string>

#include "product_rules.h"

namespace emulator {
namespace {

struct Failure {
    int32_t status;
    int64_t times;
};

std::mutex mutex;
std::map<std::string, int64_t> counts;
std::map<std::string, Failure> failures;

}  // namespace

int called(const char* function) {
    std::lock_guard<std::mutex> lock(mutex);
    ++counts[function];
    const auto planned = failures.find(function);
    if (planned == failures.end() || planned->second.times == 0) return kSuccess;
    --planned->second.times;
    return planned->second.status;
}

}  // namespace emulator

using namespace emulator;

LSQ_EXPORT const char* cublasLtGetStatusName(int status) {
    switch (status) {
        case 0: return "CUBLAS_STATUS_SUCCESS";
        case 1: return "CUBLAS_STATUS_NOT_INITIALIZED";
        case 3: return "CUBLAS_STATUS_ALLOC_FAILED";
        case 7: return "CUBLAS_STATUS_INVALID_VALUE";
        case 8: return "CUBLAS_STATUS_ARCH_MISMATCH";
        case 13: return "CUBLAS_STATUS_EXECUTION_FAILED";
        case 15: return "CUBLAS_STATUS_NOT_SUPPORTED";
    }
    return "unrecognized status";
}

// How often a function was called: those that create, destroy, look up, check and run.
LSQ_EXPORT int64_t emulated_calls(const char* function) {
    std::lock_guard<std::mutex> lock(mutex);
    return counts[function];
}

// The next `times` calls of a function return `status` and do nothing.
LSQ_EXPORT void emulated_fail(const char* function, int64_t status, int64_t times) {
    std::lock_guard<std::mutex> lock(mutex);
    failures[function] = {static_cast<int32_t>(status), times};
}
