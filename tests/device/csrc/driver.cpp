#include "driver.h"

#include <c10/util/Exception.h>
#include <dlfcn.h>

#include <array>

#include "runtime.h"

namespace standin {

namespace {

using Handle = const void*;

void* library = nullptr;

template <class... Arguments>
int call(const char* name, Arguments... arguments) {
    const auto function = reinterpret_cast<int (*)(Arguments...)>(dlsym(library, name));
    TORCH_CHECK(function, "the emulated driver has no ", name);
    return function(arguments...);
}

std::string words(int status) {
    const char* text = nullptr;
    call("cuGetErrorString", status, &text);
    return text ? text : "error " + std::to_string(status);
}

void check(int status) { TORCH_CHECK(!status, words(status)); }

Handle handle(c10::StreamId id) { return reinterpret_cast<Handle>(id); }

// The context of a device, current for a while.
class Current {
  public:
    explicit Current(c10::Device device) {
        void* context = nullptr;
        check(call("cuDevicePrimaryCtxRetain", &context, static_cast<int>(device.index())));
        check(call("cuCtxPushCurrent_v2", context));
    }
    ~Current() { call("cuCtxPopCurrent_v2", static_cast<void**>(nullptr)); }
};

}  // namespace

void open_driver(const char* path) {
    library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    TORCH_CHECK(library, "the emulated driver cannot be opened: ", dlerror());
    check(call("cuInit", 0u));
}

c10::StreamId new_stream(c10::Device device) {
    constexpr unsigned kNonBlocking = 1;  // as those of PyTorch's pool
    const Current current(device);
    Handle made = nullptr;
    check(call("cuStreamCreate", &made, kNonBlocking));
    return reinterpret_cast<c10::StreamId>(made);
}

void record_event(void** event, c10::Stream stream) {
    const Current current(stream.device());
    if (!*event) check(call("cuEventCreate", event, 0u));
    check(call("cuEventRecord", static_cast<Handle>(*event), handle(stream.id())));
}

void wait_event(void* event, c10::Stream stream) {
    const Current current(stream.device());
    if (event)
        check(call("cuStreamWaitEvent", handle(stream.id()), static_cast<Handle>(event), 0u));
}

void destroy_event(void* event, c10::Device device) {
    const Current current(device);
    if (event) call("cuEventDestroy_v2", static_cast<Handle>(event));
}

void synchronize_event(void* event, c10::Device device) {
    const Current current(device);
    if (event) check(call("cuEventSynchronize", static_cast<Handle>(event)));
}

void synchronize_stream(c10::Stream stream) {
    const Current current(stream.device());
    check(call("cuStreamSynchronize", handle(stream.id())));
}

void synchronize_device(c10::Device device) {
    const Current current(device);
    check(call("cuCtxSynchronize"));
}

void use(c10::Device device, const std::string& what, const void* address, size_t bytes,
         bool writes) {
    if (!bytes) return;
    const Current current(device);
    check(call("lsq_emulator_use", handle(current_stream(device).id()), what.c_str(), address,
               bytes, int{writes}));
}

int64_t order(bool on) {
    static int64_t times = 0;
    check(call("lsq_emulator_watch", int{on}));
    return ++times;
}

void begin_memory(c10::Stream stream, const void* address, size_t bytes) {
    const Current current(stream.device());
    check(call("lsq_emulator_memory_begin", handle(stream.id()), "of PyTorch", address, bytes));
}

std::string end_memory(c10::Stream stream, const void* address,
                       const std::vector<c10::StreamId>& others) {
    const Current current(stream.device());
    const int status =
        call("lsq_emulator_memory_end", handle(stream.id()), address, others.data(), others.size());
    return status ? words(status) : "";
}

}  // namespace standin
