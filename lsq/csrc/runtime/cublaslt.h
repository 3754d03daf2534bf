// Matrix products of cuBLASLt, opened at run time without CUDA headers: enums carry the values of
// cublasLt.h.
//
// out[M,N] = a[M,K] * b[N,K]^T, row-major. cuBLASLt is column-major: out is its D[N,M], b its A, a
// its B. This form ("TN") is its only one for int8.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

namespace lsq {

enum class DataType : int32_t { kFloat32 = 0, kInt8 = 3, kInt32 = 10, kBfloat16 = 14 };

enum Status : int {
    kSuccess = 0,
    kNotInitialized = 1,
    kOutOfMemory = 3,
    kInvalidValue = 7,
    kNotSupported = 15,
    kLibraryMissing = -1,  // ours: the library or one of its functions is not there
};

// cublasLtMatmulAlgo_t: opaque; may be saved for the same version of the library and the same model
// of device.
struct Algorithm {
    uint64_t data[8];
};
// cublasLtMatmulHeuristicResult_t.
struct Candidate {
    Algorithm algorithm;
    size_t workspace_bytes;
    int32_t status;
    float waves;
    int32_t reserved[4];
};
static_assert(sizeof(Algorithm) == 64 && sizeof(Candidate) == 96, "the layout of cublasLt.h");

// A product. Leading dimensions count elements; fields in the order of products.py.
struct ProductSpec {
    int64_t m, n, k;
    int64_t type, out_type;  // DataType
    int64_t transpose_a;     // 1: a lies as [K,M]
    int64_t transpose_b;     // 1: b lies as [K,N]
    int64_t leading_a, leading_b, leading_out;
};

struct Error : std::runtime_error {
    Error(int code, const std::string& text) : std::runtime_error(text), status(code) {}
    int status;
};

// A libcublasLt and its handle, made for the current device at the first lookup of an algorithm;
// use one per device. Never unloaded: a process may be exiting.
class CublasLt {
public:
    explicit CublasLt(const char* path);
    ~CublasLt();
    CublasLt(const CublasLt&) = delete;
    CublasLt& operator=(const CublasLt&) = delete;

    void* handle();
    uint32_t reduction_scheme(const Algorithm& algorithm) const;
    void expect(int status, const char* call, const std::string& about = "") const;
    std::string explain(int status, const char* call, const std::string& about = "") const;

    int (*create)(void** handle);
    int (*destroy)(void* handle);
    int (*desc_create)(void** desc, int32_t compute_type, int32_t scale_type);
    int (*desc_set)(void* desc, int32_t attribute, const void* value, size_t bytes);
    int (*desc_destroy)(void* desc);
    int (*layout_create)(void** layout, int32_t type, uint64_t rows, uint64_t columns,
                         int64_t leading);
    int (*layout_destroy)(void* layout);
    int (*preference_create)(void** preference);
    int (*preference_set)(void* preference, int32_t attribute, const void* value, size_t bytes);
    int (*preference_destroy)(void* preference);
    int (*get_heuristic)(void* handle, void* desc, void* a, void* b, void* c, void* d,
                         void* preference, int requested, Candidate* candidates, int* returned);
    int (*algorithm_check)(void* handle, void* desc, void* a, void* b, void* c, void* d,
                           const Algorithm* algorithm, Candidate* result);
    int (*config_get)(const Algorithm* algorithm, int32_t attribute, void* value, size_t bytes,
                      size_t* written);
    int (*matmul)(void* handle, void* desc, const void* alpha, const void* a, void* a_layout,
                  const void* b, void* b_layout, const void* beta, const void* c, void* c_layout,
                  void* d, void* d_layout, const Algorithm* algorithm, void* workspace,
                  size_t workspace_bytes, void* stream);
    const char* (*status_string)(int status);
    const char* (*status_name)(int status);
    size_t (*version)();

private:
    std::mutex mutex_;
    void* handle_ = nullptr;
};

// A product's descriptors and algorithm. `run` looks nothing up and allocates nothing, so that a
// graph may capture it and threads may share it. The caller makes the device current.
class MatrixProduct {
public:
    MatrixProduct(std::shared_ptr<CublasLt> library, const ProductSpec& spec);

    // Proposed algorithms, best first, with a workspace of at most so many bytes; may be empty.
    std::vector<Candidate> candidates(size_t workspace_bytes, int limit) const;
    // The workspace of an algorithm, or an Error where it does not fit this product, device or
    // library.
    Candidate check(const Algorithm& algorithm) const;
    // Takes an algorithm, after `check`.
    void choose(const Algorithm& algorithm);
    size_t workspace_bytes() const { return chosen_.workspace_bytes; }

    // Returns a Status. Addresses are multiples of 16 bytes, that of the workspace of 256.
    int run(const void* a, const void* b, void* out, void* workspace, size_t workspace_bytes,
            void* stream) const noexcept;

    std::string describe() const;           // "int8 [41,64] x [48,64]^T -> int32 [41,48]"
    std::string explain(int status) const;  // what a status of `run` means, and what to do

private:
    using Descriptor = std::unique_ptr<void, int (*)(void*)>;
    void expect(int status, const char* call) const;
    Descriptor layout(int64_t type, int64_t rows, int64_t columns, int64_t leading) const;
    uint32_t reduction_schemes() const;

    std::shared_ptr<CublasLt> library_;
    ProductSpec spec_;
    int32_t scale_type_;
    Descriptor desc_, a_, b_, out_;
    Candidate chosen_{};
    void* handle_ = nullptr;  // set once an algorithm is chosen
};

}  // namespace lsq
