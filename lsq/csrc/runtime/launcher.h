// A list of kernel launches and matrix products, replayed on a stream by one call.
//
// Parameters and operands are read, at every run, where they were said to stand: in words of the
// host's memory that the caller keeps alive and may write between two runs. A run allocates
// nothing, looks nothing up and does not synchronise, so that it can be captured in a CUDA graph,
// with what stands there at that moment.
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
    std::vector<void*> parameters;  // where each one's bytes stand
};

// Operands are addresses of words, in which the addresses of matrices stand.
struct ProductCall {
    const MatrixProduct* product;
    void *const *a, *const *b, *const *out;
    void* const* alphas;  // floats on the device, or null: `alpha` is the only one
    float alpha;
};

struct Workspace {
    void* memory;
    size_t bytes;
};

// Before every run, the address in `from` plus an offset is put into `to`.
struct Shift {
    const uint64_t* from;
    int64_t offset;
    uint64_t* to;
};

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

}  // namespace lsq
