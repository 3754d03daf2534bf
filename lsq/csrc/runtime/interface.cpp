// C interface of launch lists for lsq/native/runtime.py. Numbers are int64; a call that can fail
// returns 0 or a status and writes a message of at most `capacity` bytes.
#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "cublaslt.h"
#include "driver.h"

#define LSQ_EXPORT extern "C" __attribute__((visibility("default")))

using namespace lsq;

namespace {

struct Launch {
    void* function;
    Size grid, block;
    unsigned shared_bytes;
    std::vector<void*> parameters;  // where each one's bytes stand
};

// Operands are addresses of words that hold the addresses of matrices.
struct ProductCall {
    const MatrixProduct* product;
    void *const *a, *const *b, *const *out;
};

struct Workspace {
    void* memory;
    size_t bytes;
};

// Writes *from + offset to *to before every run.
struct Shift {
    const uint64_t* from;
    int64_t offset;
    uint64_t* to;
};

// Kernel launches and matrix products, replayed on a stream by one call.
//
// Every run reads parameters and operands in words of host memory, which the caller keeps alive and
// may write between runs. A run allocates nothing, looks nothing up and does not synchronise, so
// that a CUDA graph can capture it.
class LaunchList {
public:
    explicit LaunchList(const Driver& driver) : driver_(driver) {}

    void add(const std::string& what, const Launch& launch);
    void add(const std::string& what, const ProductCall& call);
    void add(const Shift& shift) { shifts_.push_back(shift); }
    // Returns 0, or the status of the first entry that failed, which `message` then explains.
    int run(void* stream, const Workspace& workspace, std::string& message);

private:
    struct Entry {
        std::string what;
        bool is_product;
        size_t index;
    };
    int start(const Entry& entry, void* stream, const Workspace& workspace);
    std::string explain(size_t entry, int status) const;

    const Driver& driver_;
    std::vector<Entry> entries_;
    std::vector<Launch> launches_;
    std::vector<ProductCall> products_;
    std::vector<Shift> shifts_;
};

void LaunchList::add(const std::string& what, const Launch& launch) {
    entries_.push_back({what, false, launches_.size()});
    launches_.push_back(launch);
}

void LaunchList::add(const std::string& what, const ProductCall& call) {
    entries_.push_back({what, true, products_.size()});
    products_.push_back(call);
}

int LaunchList::start(const Entry& entry, void* stream, const Workspace& workspace) {
    if (entry.is_product) {
        const ProductCall& call = products_[entry.index];
        return call.product->run(*call.a, *call.b, *call.out, workspace.memory, workspace.bytes,
                                 stream);
    }
    Launch& l = launches_[entry.index];
    return driver_.launch(l.function, l.grid, l.block, l.shared_bytes, stream, l.parameters.data());
}

int LaunchList::run(void* stream, const Workspace& workspace, std::string& message) {
    const Current current(driver_);
    if (current.status()) {
        message = driver_.explain_context(current.status());
        return current.status();
    }
    for (const Shift& shift : shifts_) *shift.to = *shift.from + shift.offset;
    for (size_t i = 0; i < entries_.size(); ++i) {
        if (const int status = start(entries_[i], stream, workspace)) {
            message = explain(i, status);
            return status;
        }
    }
    return 0;
}

std::string LaunchList::explain(size_t entry, int status) const {
    const Entry& failed = entries_[entry];
    std::string text =
        "entry " + std::to_string(entry + 1) + " of " + std::to_string(entries_.size());
    text += ", " + failed.what;
    if (failed.is_product) return text + ": " + products_[failed.index].product->explain(status);
    const Launch& l = launches_[failed.index];
    const auto sizes = [](const Size& size) {
        return "(" + std::to_string(size[0]) + ", " + std::to_string(size[1]) + ", " +
               std::to_string(size[2]) + ")";
    };
    return text + ", grid " + sizes(l.grid) + ", block " + sizes(l.block) + ", " +
           std::to_string(l.shared_bytes) +
           " bytes of dynamic shared memory: " + driver_.explain(status);
}

constexpr int kFailed = -1;
constexpr int kSharedSize = 1;        // CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES
constexpr int kMaxDynamicShared = 8;  // CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
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

// Makes the driver's context current in this thread until lsq_context_leave; `current` is null on
// failure.
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

// Stream `after` waits for everything launched on `before` so far.
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

// 1: the stream is captured into a graph; 0: it is not, or asking failed, which the launch then
// explains.
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

// a, b, out: of words, see ProductCall.
LSQ_EXPORT void lsq_list_add_product(void* list, const char* what, const void* product,
                                     void* const* a, void* const* b, void* const* out) {
    const ProductCall call{static_cast<const MatrixProduct*>(product), a, b, out};
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
