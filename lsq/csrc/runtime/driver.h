// The few functions of libcuda.so that launching takes; the library is opened at run time, no CUDA header is needed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>

namespace lsq {

// Never unloaded: a process may be exiting. Every function returns a CUresult, 0 for success.
class Driver {
public:
    // Opens the library at `path` and starts it. Throws std::runtime_error: it is missing, lacks a function, or finds
    // no GPU.
    explicit Driver(const char* path);

    int (*init)(unsigned flags);
    int (*version)(int* version);
    int (*current_context)(void** context);
    int (*module_load)(void** module, const void* image);
    int (*module_unload)(void* module);
    int (*module_function)(void** function, void* module, const char* name);
    int (*set_attribute)(void* function, int attribute, int value);
    int (*launch)(void* function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x, unsigned block_y,
                  unsigned block_z, unsigned shared_bytes, void* stream, void** parameters, void** extra);

    // "CUDA_ERROR_INVALID_VALUE (1): invalid argument"
    std::string explain(int status) const;

private:
    int (*error_name)(int status, const char** text);
    int (*error_string)(int status, const char** text);
};

}  // namespace lsq
