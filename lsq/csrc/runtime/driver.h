// Functions of libcuda.so for launching, opened at run time without CUDA headers.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <stdexcept>
#include <string>

namespace lsq {

using Size = std::array<unsigned, 3>;

// A device and its primary context, which PyTorch uses, too. Never released: a process may be
// exiting. Functions return a CUresult, 0 for success.
class Driver {
public:
    // Opens the library at `path` for device `ordinal`. Throws std::runtime_error: it is missing,
    // lacks a function, or finds no GPU.
    Driver(const char* path, int ordinal);

    // The device's primary context, retained when first asked for.
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

    // Launches a kernel. From compute capability 9.0 on, its blocks start when the last ones of the
    // launch before have: every kernel begins with wait_for_launches (csrc/cuda/device.cuh).
    int launch(void* function, const Size& grid, const Size& block, unsigned shared_bytes,
               void* stream, void** parameters) const;
    // Stream `after` waits for everything launched on `before` so far.
    int follow(void* before, void* after) const;
    int (*is_capturing)(void* stream, int* capturing);

    // "CUDA_ERROR_INVALID_VALUE (1): invalid argument"
    std::string explain(int status) const;
    // Why the context could not be made current.
    std::string explain_context(int status) const;

private:
    int (*device_get)(int* device, int ordinal);
    int (*device_attribute)(int* value, int attribute, int device);
    int (*launch_kernel)(const void* configuration, void* function, void** parameters,
                         void** extra);
    int (*retain_context)(void** context, int device);
    int (*event_create)(void** event, unsigned flags);
    int (*event_record)(void* event, void* stream);
    int (*event_destroy)(void* event);
    int (*stream_wait)(void* stream, void* event, unsigned flags);
    int (*error_name)(int status, const char** text);
    int (*error_string)(int status, const char** text);

    int ordinal_;
    bool overlaps_ = false;
    mutable std::mutex mutex_;
    mutable void* context_ = nullptr;
};

// Makes the driver's context current in this thread as long as it lives. Threads of autograd have
// none.
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
