// libcuda's functions of modules and launches: a launch has finished when it returns. A
// module's image is MAGIC and the path of a shared library.
#include <dlfcn.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "threads.h"
#include "streams.h"

using namespace emulator;

namespace {

constexpr int DRIVER_VERSION = 13000;
constexpr int SHARED_SIZE = 1;         // CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES
constexpr int MAX_DYNAMIC_SHARED = 8;  // CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
constexpr int OVERLAPPED = 6;  // CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
constexpr size_t DEFAULT_SHARED = 48 * 1024;
constexpr char MAGIC[] = "lsq-emulated-module\n";

// CUlaunchAttribute and CUlaunchConfig.
struct LaunchAttribute {
    int id;
    alignas(8) unsigned char value[64];
};
struct LaunchConfiguration {
    Index grid, block;
    unsigned shared;
    const void* stream;
    const LaunchAttribute* attributes;
    unsigned count;
};

struct Function {
    std::string name;
    Context* context;
    void (*kernel)(void** arguments);
    const size_t* parameters;  // the bytes of each, ended by 0
    Memory static_shared;
    size_t dynamic_shared;  // the most that a launch may ask for

    size_t static_bytes() const { return static_shared.end - static_shared.begin; }
};

struct Module {
    void* library;
    Context* context;
    std::map<std::string, Function> functions;
};

std::map<Module*, std::unique_ptr<Module>> modules;  // the loaded ones

bool too_large(Index size, unsigned x, unsigned y, unsigned z) {
    return !size.x || !size.y || !size.z || size.x > x || size.y > y || size.z > z;
}

std::string words(Index size) {
    return std::to_string(size.x) + " x " + std::to_string(size.y) + " x " + std::to_string(size.z);
}

// A GPU's refusal of a launch's shape, or empty.
std::string refusal(const Function& function, const Launch& launch) {
    if (too_large(launch.grid, 0x7fffffff, 65535, 65535)) {
        return "a grid of " + words(launch.grid) +
               " blocks; allowed are 1 to 2147483647 x 65535 x 65535";
    }
    if (too_large(launch.block, 1024, 1024, 64) ||
        launch.block.x * launch.block.y * launch.block.z > 1024) {
        return "blocks of " + words(launch.block) +
               " threads; allowed are 1 to 1024 x 1024 x 64, 1024 in all";
    }
    if (launch.shared > function.dynamic_shared) {
        return std::to_string(launch.shared) +
               " bytes of dynamic shared memory; the function, which has " +
               std::to_string(function.static_bytes()) + " static bytes, allows " +
               std::to_string(function.dynamic_shared) +
               " (more must be allowed first: cuFuncSetAttribute, MAX_DYNAMIC_SHARED_SIZE_BYTES)";
    }
    return "";
}

// Copies a launch's arguments, for runs from a graph.
Work repeatable(const Function& function, const Launch& launch) {
    std::vector<std::vector<unsigned char>> values;
    for (const size_t* bytes = function.parameters; *bytes; ++bytes) {
        const auto* value = static_cast<const unsigned char*>(launch.arguments[values.size()]);
        values.emplace_back(value, value + *bytes);
    }
    return [launch, values]() mutable {
        std::vector<void*> arguments;
        for (auto& value : values) arguments.push_back(value.data());
        Launch again = launch;
        again.arguments = arguments.data();
        return emulator::run(again);
    };
}

}  // namespace

extern "C" EMULATOR_VISIBLE void lsq_emulator_order(int order) { set_order(order); }

DRIVER cuInit(unsigned) { return SUCCESS; }

DRIVER cuDriverGetVersion(int* version) {
    *version = DRIVER_VERSION;
    return SUCCESS;
}

DRIVER cuModuleLoadData(Module** module, const void* image) {
    return guarded([&] {
        Context& context = current_context();
        refuse_unsafe("cuModuleLoadData");
        const char* text = static_cast<const char*>(image);
        if (std::strncmp(text, MAGIC, sizeof MAGIC - 1) != 0) {
            fail(INVALID_IMAGE,
                 "not a module of the emulator; make it with lsq.emulator.compile_kernels");
        }
        void* library = dlopen(text + sizeof MAGIC - 1, RTLD_NOW | RTLD_LOCAL);
        if (!library) fail(INVALID_IMAGE, dlerror());
        auto made = std::make_unique<Module>(Module{library, &context, {}});
        *module = made.get();
        modules.emplace(*module, std::move(made));
    });
}

DRIVER cuModuleUnload(Module* module) {
    return guarded([&] {
        dlclose(module->library);
        modules.erase(module);
    });
}

DRIVER cuModuleGetFunction(Function** function, Module* module, const char* name) {
    return guarded([&] {
        const auto known = module->functions.find(name);
        if (known != module->functions.end()) {
            *function = &known->second;
            return;
        }
        const auto find = [&](const std::string& symbol) {
            return dlsym(module->library, symbol.c_str());
        };
        void* kernel = find(std::string(name) + "__launch");
        if (!kernel)
            fail(NOT_FOUND, std::string("no kernel ") + name + " (or no LSQ_EXPORT after it)");
        const auto shared = reinterpret_cast<Memory (*)()>(find("emulator_static_shared"));
        const auto parameters =
            reinterpret_cast<const size_t* (*)()>(find(std::string(name) + "__parameters"));
        if (!shared || !parameters)
            fail(NOT_FOUND, std::string("kernel ") + name + " has no LSQ_EXPORT of its own");
        Function made{name,         module->context, reinterpret_cast<void (*)(void**)>(kernel),
                      parameters(), shared(),        0};
        made.dynamic_shared = DEFAULT_SHARED - std::min(DEFAULT_SHARED, made.static_bytes());
        *function = &module->functions.emplace(name, made).first->second;
    });
}

DRIVER cuFuncGetAttribute(int* value, int attribute, Function* function) {
    return guarded([&] {
        if (attribute != SHARED_SIZE) fail(INVALID_VALUE, "attribute " + std::to_string(attribute));
        *value = static_cast<int>(function->static_bytes());
    });
}

DRIVER cuFuncSetAttribute(Function* function, int attribute, int value) {
    return guarded([&] {
        if (attribute != MAX_DYNAMIC_SHARED) return;
        const size_t most = LARGEST_SHARED - function->static_bytes();
        if (value < 0 || static_cast<size_t>(value) > most) {
            fail(INVALID_VALUE, "kernel " + function->name + ": " + std::to_string(value) +
                                    " bytes of dynamic shared memory; allowed are 0 to " +
                                    std::to_string(most));
        }
        function->dynamic_shared = value;
    });
}

DRIVER cuLaunchKernelEx(const LaunchConfiguration* given, Function* function, void** arguments,
                        void**) {
    return guarded([&] {
        for (unsigned i = 0; i < given->count; ++i) {
            if (given->attributes[i].id != OVERLAPPED)
                fail(INVALID_VALUE,
                     "launch attribute " + std::to_string(given->attributes[i].id));
        }
        Stream& stream = find_stream(given->stream);
        const Launch launch{function->name.c_str(),  function->kernel, given->grid,
                            given->block,            given->shared,    function->static_shared,
                            arguments};
        const std::string what = "kernel " + function->name, refused = refusal(*function, launch);
        if (!refused.empty()) fail(INVALID_VALUE, what + ": " + refused);
        if (function->context != &stream.context) {
            fail(INVALID_HANDLE, what + " was loaded into another context than the current one");
        }
        submit(
            stream, what,
            stream.capture ? repeatable(*function, launch) : [&] { return run(launch); });
    });
}
