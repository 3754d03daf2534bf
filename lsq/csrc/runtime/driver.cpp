#include "driver.h"

#include <dlfcn.h>

namespace lsq {

namespace {

constexpr unsigned kWithoutTiming = 2;  // CU_EVENT_DISABLE_TIMING
constexpr int kMajor = 75;              // CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR
constexpr int kFirstThatOverlaps = 9;

// CUlaunchAttribute.
struct LaunchAttribute {
    int id = 6;  // CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    int padding = 0;
    int value[16] = {1};
};

// CUlaunchConfig.
struct LaunchConfiguration {
    Size grid, block;
    unsigned shared_bytes;
    void* stream;
    const LaunchAttribute* attributes;
    unsigned count;
};

static_assert(sizeof(LaunchAttribute) == 72 && sizeof(LaunchConfiguration) == 56, "as in cuda.h");

template <class Function>
void find(void* library, const char* path, const char* name, Function& function) {
    function = reinterpret_cast<Function>(dlsym(library, name));
    if (function) return;
    throw std::runtime_error(std::string(path) + " has no function " + name +
                             "; update the NVIDIA driver");
}

}  // namespace

Driver::Driver(const char* path, int ordinal) : ordinal_(ordinal) {
    void* library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!library)
        throw std::runtime_error(std::string("the NVIDIA driver cannot be opened: ") + dlerror());
    find(library, path, "cuInit", init);
    find(library, path, "cuDriverGetVersion", version);
    find(library, path, "cuDeviceGet", device_get);
    find(library, path, "cuDeviceGetAttribute", device_attribute);
    find(library, path, "cuDevicePrimaryCtxRetain", retain_context);
    find(library, path, "cuCtxGetCurrent", current_context);
    find(library, path, "cuCtxPushCurrent_v2", push_context);
    find(library, path, "cuCtxPopCurrent_v2", pop_context);
    find(library, path, "cuEventCreate", event_create);
    find(library, path, "cuEventRecord", event_record);
    find(library, path, "cuEventDestroy_v2", event_destroy);
    find(library, path, "cuStreamWaitEvent", stream_wait);
    find(library, path, "cuStreamIsCapturing", is_capturing);
    find(library, path, "cuModuleLoadData", module_load);
    find(library, path, "cuModuleUnload", module_unload);
    find(library, path, "cuModuleGetFunction", module_function);
    find(library, path, "cuFuncGetAttribute", get_attribute);
    find(library, path, "cuFuncSetAttribute", set_attribute);
    find(library, path, "cuLaunchKernelEx", launch_kernel);
    find(library, path, "cuGetErrorName", error_name);
    find(library, path, "cuGetErrorString", error_string);
    if (const int status = init(0))
        throw std::runtime_error("the NVIDIA driver does not start: " + explain(status));
    int device = 0, major = 0;
    overlaps_ = !device_get(&device, ordinal) && !device_attribute(&major, kMajor, device) &&
                major >= kFirstThatOverlaps;
}

int Driver::context(void** context) const {
    const std::lock_guard<std::mutex> lock(mutex_);
    int device = 0, status = 0;
    if (!context_) status = device_get(&device, ordinal_);
    if (!context_ && !status) status = retain_context(&context_, device);
    *context = context_;
    return status;
}

std::string Driver::explain(int status) const {
    const char *name = nullptr, *text = nullptr;
    error_name(status, &name);
    error_string(status, &text);
    const std::string found =
        std::string(name ? name : "CUDA error") + " (" + std::to_string(status) + ")";
    return text ? found + ": " + text : found;
}

int Driver::launch(void* function, const Size& grid, const Size& block, unsigned shared_bytes,
                   void* stream, void** parameters) const {
    const LaunchAttribute overlap;
    const LaunchConfiguration given{grid, block, shared_bytes, stream, &overlap, overlaps_};
    return launch_kernel(&given, function, parameters, nullptr);
}

int Driver::follow(void* before, void* after) const {
    void* event = nullptr;
    if (const int status = event_create(&event, kWithoutTiming)) return status;
    int status = event_record(event, before);
    if (!status) status = stream_wait(after, event, 0);
    event_destroy(event);  // a stream that waits for it still does
    return status;
}

Current::Current(const Driver& driver) : driver_(driver) {
    void *wanted = nullptr, *found = nullptr;
    status_ = driver.context(&wanted);
    if (!status_) status_ = driver.current_context(&found);
    if (status_ || found == wanted) return;
    status_ = driver.push_context(wanted);
    pushed_ = !status_;
}

Current::~Current() {
    void* ours = nullptr;
    if (pushed_) driver_.pop_context(&ours);
}

std::string Driver::explain_context(int status) const {
    return "the context of GPU " + std::to_string(ordinal_) + " cannot be used: " + explain(status);
}

}  // namespace lsq
