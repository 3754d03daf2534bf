// The functions of libcuda that the launcher calls, for kernels that run in the emulator. Streams do not exist here:
// a launch has finished when cuLaunchKernel returns. A module's image is MAGIC and the path of a shared library.
#include <dlfcn.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "contexts.h"
#include "scheduler.h"

namespace {

// Results, with the numbers of cuda.h.
constexpr int SUCCESS = 0;
constexpr int INVALID_VALUE = 1;
constexpr int INVALID_DEVICE = 101;
constexpr int INVALID_IMAGE = 200;
constexpr int INVALID_CONTEXT = 201;
constexpr int NOT_FOUND = 500;
constexpr int LAUNCH_FAILED = 719;

constexpr int DRIVER_VERSION = 13000;
constexpr int SHARED_SIZE = 1;         // CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES
constexpr int MAX_DYNAMIC_SHARED = 8;  // CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
constexpr size_t DEFAULT_SHARED = 48 * 1024;
constexpr char NO_CONTEXT[] = "no context is current in this thread; make one current first (cuCtxPushCurrent)";
constexpr char MAGIC[] = "lsq-emulated-module\n";

struct Function {
    std::string name;
    void (*kernel)(void** arguments);
    emulator::Memory static_shared;
    size_t dynamic_shared;  // the most that a launch may ask for

    size_t static_bytes() const { return static_shared.end - static_shared.begin; }
};

struct Module {
    void* library;
    std::map<std::string, Function> functions;
};

std::mutex functions_guard;
thread_local std::string last_message;
thread_local int last_failure = SUCCESS;

int fail(int result, const std::string& message) {
    last_failure = result;
    last_message = message;
    return result;
}

bool too_large(emulator::Index size, unsigned x, unsigned y, unsigned z) {
    return !size.x || !size.y || !size.z || size.x > x || size.y > y || size.z > z;
}

std::string words(emulator::Index size) {
    return std::to_string(size.x) + " x " + std::to_string(size.y) + " x " + std::to_string(size.z);
}

// What a GPU would refuse about a launch's shape; empty if nothing.
std::string refusal(const Function& function, const emulator::Launch& launch) {
    if (too_large(launch.grid, 0x7fffffff, 65535, 65535)) {
        return "a grid of " + words(launch.grid) + " blocks; allowed are 1 to 2147483647 x 65535 x 65535";
    }
    if (too_large(launch.block, 1024, 1024, 64) || launch.block.x * launch.block.y * launch.block.z > 1024) {
        return "blocks of " + words(launch.block) + " threads; allowed are 1 to 1024 x 1024 x 64, 1024 in all";
    }
    if (launch.shared > function.dynamic_shared) {
        return std::to_string(launch.shared) + " bytes of dynamic shared memory; the function, which has " +
               std::to_string(function.static_bytes()) + " static bytes, allows " +
               std::to_string(function.dynamic_shared) +
               " (more must be allowed first: cuFuncSetAttribute, MAX_DYNAMIC_SHARED_SIZE_BYTES)";
    }
    return "";
}

}  // namespace

extern "C" {

#define DRIVER EMULATOR_VISIBLE int

EMULATOR_VISIBLE void lsq_emulator_order(int order) { emulator::set_order(order); }

DRIVER cuInit(unsigned) { return SUCCESS; }

DRIVER cuDriverGetVersion(int* version) {
    *version = DRIVER_VERSION;
    return SUCCESS;
}

DRIVER cuModuleLoadData(Module** module, const void* image) {
    if (!emulator::current_context()) return fail(INVALID_CONTEXT, NO_CONTEXT);
    const char* text = static_cast<const char*>(image);
    if (std::strncmp(text, MAGIC, sizeof MAGIC - 1) != 0) {
        return fail(INVALID_IMAGE, "not a module of the emulator; make it with lsq.csrc.emulator.compile_kernels");
    }
    void* library = dlopen(text + sizeof MAGIC - 1, RTLD_NOW | RTLD_LOCAL);
    if (!library) return fail(INVALID_IMAGE, dlerror());
    *module = new Module{library, {}};
    return SUCCESS;
}

DRIVER cuModuleUnload(Module* module) {
    dlclose(module->library);
    delete module;
    return SUCCESS;
}

DRIVER cuModuleGetFunction(Function** function, Module* module, const char* name) {
    const std::lock_guard<std::mutex> guard(functions_guard);
    const auto known = module->functions.find(name);
    if (known != module->functions.end()) {
        *function = &known->second;
        return SUCCESS;
    }
    void* kernel = dlsym(module->library, (std::string(name) + "__launch").c_str());
    if (!kernel) return fail(NOT_FOUND, std::string("no kernel ") + name + " (or no LSQ_EXPORT after it)");
    const auto shared =
        reinterpret_cast<emulator::Memory (*)()>(dlsym(module->library, "emulator_static_shared"));
    Function made{name, reinterpret_cast<void (*)(void**)>(kernel), shared(), 0};
    made.dynamic_shared = DEFAULT_SHARED - std::min(DEFAULT_SHARED, made.static_bytes());
    *function = &module->functions.emplace(name, made).first->second;
    return SUCCESS;
}

DRIVER cuFuncGetAttribute(int* value, int attribute, Function* function) {
    if (attribute != SHARED_SIZE) return fail(INVALID_VALUE, "attribute " + std::to_string(attribute));
    *value = static_cast<int>(function->static_bytes());
    return SUCCESS;
}

DRIVER cuFuncSetAttribute(Function* function, int attribute, int value) {
    if (attribute != MAX_DYNAMIC_SHARED) return SUCCESS;
    const size_t most = emulator::LARGEST_SHARED - function->static_bytes();
    if (value < 0 || static_cast<size_t>(value) > most) {
        return fail(INVALID_VALUE, "kernel " + function->name + ": " + std::to_string(value) +
                                       " bytes of dynamic shared memory; allowed are 0 to " + std::to_string(most));
    }
    function->dynamic_shared = value;
    return SUCCESS;
}

DRIVER cuLaunchKernel(Function* function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                      unsigned block_y, unsigned block_z, unsigned shared, void*, void** arguments, void**) {
    if (!emulator::current_context()) return fail(INVALID_CONTEXT, NO_CONTEXT);
    const emulator::Launch launch{function->name.c_str(),       function->kernel, {grid_x, grid_y, grid_z},
                                  {block_x, block_y, block_z},  shared,           function->static_shared,
                                  arguments};
    const std::string refused = refusal(*function, launch);
    if (!refused.empty()) return fail(INVALID_VALUE, "kernel " + function->name + ": " + refused);
    const std::string fault = emulator::run(launch);
    return fault.empty() ? SUCCESS : fail(LAUNCH_FAILED, fault);
}

DRIVER cuGetErrorName(int result, const char** name) {
    *name = result == SUCCESS           ? "CUDA_SUCCESS"
            : result == INVALID_VALUE   ? "CUDA_ERROR_INVALID_VALUE"
            : result == INVALID_DEVICE  ? "CUDA_ERROR_INVALID_DEVICE"
            : result == INVALID_IMAGE   ? "CUDA_ERROR_INVALID_IMAGE"
            : result == INVALID_CONTEXT ? "CUDA_ERROR_INVALID_CONTEXT"
            : result == NOT_FOUND       ? "CUDA_ERROR_NOT_FOUND"
            : result == LAUNCH_FAILED   ? "CUDA_ERROR_LAUNCH_FAILED"
                                        : nullptr;
    return *name ? SUCCESS : INVALID_VALUE;
}

// What went wrong in this thread's last call that failed with `result`; only the name of any other.
DRIVER cuGetErrorString(int result, const char** message) {
    const int found = cuGetErrorName(result, message);
    if (result == last_failure && result != SUCCESS) *message = last_message.c_str();
    return found;
}

}  // extern "C"
