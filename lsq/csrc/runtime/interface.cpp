// The C interface of the launcher, as lsq/native/runtime.py calls it. Numbers are int64; a call
// that can fail returns 0 or a status and writes a message of at most `capacity` bytes.
#include <cstring>

#include "launcher.h"

#define LSQ_EXPORT extern "C" __attribute__((visibility("default")))

using namespace lsq;

namespace {

constexpr int kFailed = -1;
constexpr int kSharedSize = 1;              // CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES
constexpr int kMaxDynamicShared = 8;        // CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
// Static and dynamic bytes; a kernel gets more only when it asks.
constexpr int64_t kUsualShared = 48 << 10;

int64_t fail(int64_t status, const std::string& text, char* message, int64_t capacity) {
    const size_t length = std::min(text.size(), static_cast<size_t>(capacity - 1));
    std::memcpy(message, text.data(), length);
    message[length] = 0;
    return status;
}

// Lets a kernel use `dynamic` bytes of shared memory beside its own.
int allow_shared(const Driver& driver, void* function, int64_t dynamic) {
    int fixed = 0;
    if (const int status = driver.get_attribute(&fixed, kSharedSize, function)) return status;
    if (fixed + dynamic <= kUsualShared) return 0;
    return driver.set_attribute(function, kMaxDynamicShared, static_cast<int>(dynamic));
}

}  // namespace

LSQ_EXPORT int64_t lsq_driver_open(const char* path, int64_t ordinal, void** driver,
                                   int64_t* version, char* message, int64_t capacity) {
    try {
        Driver* made = new Driver(path, static_cast<int>(ordinal));
        int found = 0;
        made->version(&found);
        *driver = made;
        *version = found;
        return 0;
    } catch (const std::exception& error) {
        return fail(kFailed, error.what(), message, capacity);
    }
}

// Makes the driver's context current in this thread until lsq_context_leave; a null `current` says
// that it failed.
LSQ_EXPORT int64_t lsq_context_enter(void* driver, void** current, char* message,
                                     int64_t capacity) {
    const Driver& cuda = *static_cast<Driver*>(driver);
    Current* made = new Current(cuda);
    *current = made->status() ? nullptr : made;
    if (*current) return 0;
    const int status = made->status();
    delete made;
    return fail(status, cuda.explain_context(status), message, capacity);
}

// In the same thread.
LSQ_EXPORT void lsq_context_leave(void* current) { delete static_cast<Current*>(current); }

// What is launched on stream `after` from now on waits for everything that was launched on `before`
// so far.
LSQ_EXPORT int64_t lsq_stream_follow(void* driver, void* before, void* after, char* message,
                                     int64_t capacity) {
    const Driver& cuda = *static_cast<Driver*>(driver);
    const Current current(cuda);
    int status = current.status();
    if (!status) status = cuda.follow(before, after);
    return status ? fail(status, "a stream cannot wait for another: " + cuda.explain(status),
                         message, capacity)
                  : 0;
}

// 1: what is launched on the stream goes into a graph. 0: it runs, or it fails, which the launch
// then explains.
LSQ_EXPORT int64_t lsq_stream_capturing(void* driver, void* stream) {
    const Driver& cuda = *static_cast<Driver*>(driver);
    const Current current(cuda);
    int capturing = 0;
    return !current.status() && !cuda.is_capturing(stream, &capturing) && capturing;
}

// Loads machine code into the driver's context and finds a function in it, which may take `shared`
// bytes of dynamic shared memory.
LSQ_EXPORT int64_t lsq_function_load(void* driver, const void* image, const char* name,
                                     int64_t shared, void** module, void** function, char* message,
                                     int64_t capacity) {
    const Driver& cuda = *static_cast<Driver*>(driver);
    const Current current(cuda);
    int status = current.status();
    if (status) return fail(status, cuda.explain_context(status), message, capacity);
    status = cuda.module_load(module, image);
    if (status)
        return fail(status, "a kernel cannot be loaded: " + cuda.explain(status), message,
                    capacity);
    status = cuda.module_function(function, *module, name);
    if (!status) status = allow_shared(cuda, *function, shared);
    if (!status) return 0;
    const std::string reason = cuda.explain(status);
    cuda.module_unload(*module);
    return fail(status, std::string(name) + " cannot be used: " + reason, message, capacity);
}

LSQ_EXPORT void* lsq_list_create(void* driver) {
    return new LaunchList(*static_cast<Driver*>(driver));
}

LSQ_EXPORT void lsq_list_destroy(void* list) { delete static_cast<LaunchList*>(list); }

// sizes: grid, then block, three each. parameters: where the bytes of each stand, see LaunchList.
LSQ_EXPORT void lsq_list_add_launch(void* list, const char* what, void* function,
                                    const int64_t* sizes, int64_t shared, void* const* parameters,
                                    int64_t count) {
    Launch launch{
        function, {}, {}, static_cast<unsigned>(shared), {parameters, parameters + count}};
    for (int i = 0; i < 3; ++i) {
        launch.grid[i] = static_cast<unsigned>(sizes[i]);
        launch.block[i] = static_cast<unsigned>(sizes[3 + i]);
    }
    static_cast<LaunchList*>(list)->add(what, launch);
}

// a, b, out, alphas: of words, see ProductCall.
LSQ_EXPORT void lsq_list_add_product(void* list, const char* what, const void* product,
                                     void* const* a, void* const* b, void* const* out,
                                     void* const* alphas, float alpha) {
    const ProductCall call{static_cast<const MatrixProduct*>(product), a, b, out, alphas, alpha};
    static_cast<LaunchList*>(list)->add(what, call);
}

LSQ_EXPORT void lsq_list_add_shift(void* list, const uint64_t* from, int64_t offset, uint64_t* to) {
    static_cast<LaunchList*>(list)->add(Shift{from, offset, to});
}

LSQ_EXPORT int64_t lsq_list_run(void* list, void* stream, void* workspace, int64_t workspace_bytes,
                                char* message, int64_t capacity) {
    std::string text;
    const Workspace handed{workspace, static_cast<size_t>(workspace_bytes)};
    const int status = static_cast<LaunchList*>(list)->run(stream, handed, text);
    return status ? fail(status, text, message, capacity) : 0;
}
