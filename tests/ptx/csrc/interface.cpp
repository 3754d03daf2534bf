// The interpreter as a library.
#include <cstdio>

#include "machine.h"

namespace {

struct Module {
    ptx::ModuleText text;
    std::map<std::string, std::vector<uint64_t>> globals;  // content, at multiples of 8
    ptx::Tables tables;
    std::map<std::string, std::unique_ptr<ptx::Kernel>> kernels;
};

void tell(const std::string& what, char* message, size_t size) {
    std::snprintf(message, size, "%s", what.c_str());
}

}  // namespace

extern "C" {

struct PtxLaunch {
    const char* kernel;
    uint32_t grid[3], block[3];
    uint64_t shared;
    const void* const* parameters;  // the place of each
    const uint64_t* parameter_bytes;
    uint64_t parameter_count;
    const uint64_t* allocations;  // first address and bytes of each
    uint64_t allocation_count;
    int order;  // of threads: see Block::run
};

// `tables`: for each of `count` layouts its name, length and numbers. An error: nullptr and a
// message.
__attribute__((visibility("default"))) void* ptx_load(const char* text, uint64_t count,
                                                      const char* const* names, const int* lengths,
                                                      const int* const* tables, char* message,
                                                      size_t message_bytes) try {
    auto module = std::make_unique<Module>();
    for (uint64_t i = 0; i < count; ++i)
        module->tables[names[i]].assign(tables[i], tables[i] + lengths[i]);
    module->text = ptx::parse(text);
    std::map<std::string, uint64_t> addresses;
    for (const ptx::Variable& variable : module->text.variables) {
        if (variable.space != ptx::Space::GLOBAL) continue;
        std::vector<uint64_t>& content = module->globals[variable.name];
        content.resize(variable.bytes / 8 + 1 + variable.align / 8);
        const auto first = reinterpret_cast<uint64_t>(content.data());
        const uint64_t address = (first + variable.align - 1) / variable.align * variable.align;
        std::memcpy(reinterpret_cast<void*>(address), variable.content.data(), variable.bytes);
        addresses[variable.name] = address;
    }
    for (const ptx::KernelText& kernel : module->text.kernels)
        module->kernels[kernel.name] =
            ptx::decode(kernel, module->text.variables, addresses, module->tables);
    return module.release();
} catch (const std::exception& error) {
    tell(error.what(), message, message_bytes);
    return nullptr;
}

__attribute__((visibility("default"))) void ptx_free(void* module) {
    delete static_cast<Module*>(module);
}

// Returns 0, or 1 with a message.
__attribute__((visibility("default"))) int ptx_launch(void* loaded, const PtxLaunch* given,
                                                      char* message, size_t message_bytes) try {
    Module& module = *static_cast<Module*>(loaded);
    const auto found = module.kernels.find(given->kernel);
    if (found == module.kernels.end()) throw ptx::Error(std::string("no kernel ") + given->kernel);
    const ptx::Kernel& kernel = *found->second;
    for (int axis = 0; axis < 3; ++axis)
        if (kernel.text->threads[axis] &&
            given->block[axis] > static_cast<uint32_t>(kernel.text->threads[axis]))
            throw ptx::Error(kernel.name + ": more threads than .maxntid");
    ptx::Allocations allocations;
    for (uint64_t i = 0; i < given->allocation_count; ++i)
        allocations.add(given->allocations[2 * i], given->allocations[2 * i + 1]);
    for (const auto& [name, content] : module.globals)
        allocations.add(reinterpret_cast<uint64_t>(content.data()), 8 * content.size());
    allocations.sort();
    if (given->parameter_count != kernel.parameter_offsets.size())
        throw ptx::Error(kernel.name + ": another number of parameters");
    std::vector<uint8_t> parameters(kernel.parameter_bytes);
    for (size_t i = 0; i < kernel.parameter_offsets.size(); ++i) {
        const uint64_t bytes = kernel.text->parameters[i].bytes;
        if (given->parameter_bytes[i] != bytes)
            throw ptx::Error(kernel.name + ": parameter " + std::to_string(i) + " has " +
                             std::to_string(bytes) + " bytes");
        std::memcpy(&parameters[kernel.parameter_offsets[i]], given->parameters[i], bytes);
    }
    ptx::GlobalMemory memory;
    ptx::Launch launch = {&kernel,           {},           {},      given->shared,
                          parameters.data(), &allocations, &memory, given->order};
    std::memcpy(launch.grid, given->grid, sizeof launch.grid);
    std::memcpy(launch.block, given->block, sizeof launch.block);
    const uint64_t blocks = uint64_t{1} * given->grid[0] * given->grid[1] * given->grid[2];
    for (uint64_t turn = 0; turn < blocks; ++turn) {
        ptx::Block(launch, static_cast<int>(given->order == 1 ? blocks - 1 - turn : turn)).run();
    }
    return 0;
} catch (const std::exception& error) {
    tell(error.what(), message, message_bytes);
    return 1;
}

}  // extern "C"
