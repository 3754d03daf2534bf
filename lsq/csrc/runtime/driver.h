// The few functions of libcuda.so that launching takes; the library is opened at run time, no CUDA
// header is needed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <stdexcept>
#include <string>

namespace lsq {

// One device and its primary context, which PyTorch works in as well. Never unloaded nor released:
// a process may be exiting. Every function returns a CUresult, 0 for success.
class Driver {
public:
    // Opens the library at `path` and starts it, for device `ordinal`. Throws std::runtime_error:
    // it is missing, lacks a function, or finds no GPU.
    Driver(const char* path, int ordinal);

    // The device's primary context, retained, and thereby made, when it is first wanted.
    int context(void** context) const;

    int (*init)(unsigned flags);
    int (*version)(int* version);
    int (*current_context)(void** context);
    int (*push_context)(void* context);
    int (*pop_context)(void** context);
    int (*module_load)(void** module, const void* image);
    int (*module_unload)(void* module);
    int (*module_function)(void** function, void* module, const char* name);
    int (*get_attribute)(int* value, int attribute, void* function);
    int (*set_attribute)(void* function, int attribute, int value);
    int (*launch)(void* function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                  unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared_bytes,
                  void* stream, void** parameters, void** extra);

    // Lets what is launched on stream `after` from now on wait for everything that was launched on
    // `before` so far.
    int follow(void* before, void* after) const;
    int (*is_capturing)(void* stream, int* capturing);

    // "CUDA_ERROR_INVALID_VALUE (1): invalid argument"
    std::string explain(int status) const;
    // Why the context could not be made current.
    std::string explain_context(int status) const;

private:
    int (*device_get)(int* device, int ordinal);
    int (*retain_context)(void** context, int device);
    int (*event_create)(void** event, unsigned flags);
    int (*event_record)(void* event, void* stream);
    int (*event_destroy)(void* event);
    int (*stream_wait)(void* stream, void* event, unsigned flags);
    int (*error_name)(int status, const char** text);
    int (*error_string)(int status, const char** text);

    int ordinal_;
    mutable std::mutex mutex_;
    mutable void* context_ = nullptr;
};

// As long as it lives, the driver's context is current in this thread; then it is as before. A
// fresh thread, such as those of autograd, has none.
class Current {
public:
    explicit Current(const Driver& driver);
    ~Current();
    Current(const Current&) = delete;
    Current& operator=(const Current&) = delete;

    int status() const { return status_; }

private:
    const Driver& driver_;
    int status_;
    bool pushed_ = false;
};

}  // namespace lsq
