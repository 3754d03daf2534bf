// A list of kernel launches and matrix products at fixed addresses, replayed on a stream by one call.
//
// A run allocates nothing, looks nothing up and does not synchronise, so that it can be captured in a CUDA graph.
#pragma once

#include <array>
#include <string>
#include <vector>

#include "cublaslt.h"
#include "driver.h"

namespace lsq {

struct Launch {
    void* function;
    std::array<unsigned, 3> grid, block;
    unsigned shared_bytes;
    size_t first_parameter;  // in LaunchList::parameters_
};

struct ProductCall {
    const MatrixProduct* product;
    const void *a, *b;
    void *out, *workspace;
    size_t workspace_bytes;
    const void* alphas;  // floats on the device, or null: `alpha` is the only one
    float alpha;
};

class LaunchList {
public:
    explicit LaunchList(const Driver& driver) : driver_(driver) {}

    // Appends a launch with its parameters: `words` of 8 bytes, parameter i beginning at words[begins[i]]. A float stands in
    // the first four bytes of its word.
    void add(const std::string& what, const Launch& launch, const uint64_t* words, size_t count, const int64_t* begins,
             size_t parameters);
    void add(const std::string& what, const ProductCall& call);
    // Must be called once after the last `add`.
    void close();
    // Returns 0, or the status of the first entry that failed, which `message` then explains.
    int run(void* stream, std::string& message);

private:
    struct Entry {
        std::string what;
        bool is_product;
        size_t index;
    };
    int start(const Entry& entry, void* stream);
    std::string explain(size_t entry, int status) const;

    const Driver& driver_;
    std::vector<Entry> entries_;
    std::vector<Launch> launches_;
    std::vector<ProductCall> products_;
    std::vector<uint64_t> words_;
    std::vector<size_t> begins_;     // of each parameter in `words_`
    std::vector<void*> parameters_;  // the same as addresses
};

}  // namespace lsq
