// Opens libcublasLt, describes products and runs them.
#include "cublaslt.h"

#include <dlfcn.h>

#include <algorithm>
#include <cstring>

namespace lsq {
namespace {

enum ComputeType : int32_t { kCompute32F = 68, kCompute32I = 72 };
enum Transposition : int32_t { kPlain = 0, kTransposed = 1 };
enum DescAttribute : int32_t { kDescTransposeA = 3, kDescTransposeB = 4 };
enum PreferenceAttribute : int32_t {
    kPreferenceWorkspace = 1,
    kPreferenceReductionSchemes = 3,
    kPreferenceFirstAlignment = 5,  // of A; those of B, C and D follow
    kPreferenceLastAlignment = 8,
};
enum ConfigAttribute : int32_t { kConfigReductionScheme = 3 };
enum ReductionScheme : uint32_t { kReduceInComputeType = 2, kReduceAnyhow = 7 };

constexpr uint32_t kOperandAlignment = 16;
constexpr uintptr_t kWorkspaceAlignment = 256;

bool aligned(const void* pointer, uintptr_t bytes) {
    return reinterpret_cast<uintptr_t>(pointer) % bytes == 0;
}

const char* name(int64_t type) {
    switch (static_cast<DataType>(type)) {
        case DataType::kFloat32: return "float32";
        case DataType::kInt8: return "int8";
        case DataType::kInt32: return "int32";
        case DataType::kBfloat16: return "bfloat16";
    }
    return "unknown type";
}

std::string shape(int64_t rows, int64_t columns) {
    return "[" + std::to_string(rows) + "," + std::to_string(columns) + "]";
}

template <typename Function>
void load(void* library, Function& function, const char* name) {
    function = reinterpret_cast<Function>(dlsym(library, name));
    if (!function)
        throw Error(kLibraryMissing,
                    std::string("libcublasLt has no function ") + name + "; it is too old");
}

template <typename Value, typename Target>
int set(int (*setter)(Target*, int32_t, const void*, size_t), Target* target, int32_t attribute,
        Value value) {
    return setter(target, attribute, &value, sizeof value);
}

}  // namespace

CublasLt::CublasLt(const char* path) {
    void* library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!library)
        throw Error(kLibraryMissing, std::string("libcublasLt cannot be loaded: ") + dlerror());
    load(library, create, "cublasLtCreate");
    load(library, destroy, "cublasLtDestroy");
    load(library, desc_create, "cublasLtMatmulDescCreate");
    load(library, desc_set, "cublasLtMatmulDescSetAttribute");
    load(library, desc_destroy, "cublasLtMatmulDescDestroy");
    load(library, layout_create, "cublasLtMatrixLayoutCreate");
    load(library, layout_destroy, "cublasLtMatrixLayoutDestroy");
    load(library, preference_create, "cublasLtMatmulPreferenceCreate");
    load(library, preference_set, "cublasLtMatmulPreferenceSetAttribute");
    load(library, preference_destroy, "cublasLtMatmulPreferenceDestroy");
    load(library, get_heuristic, "cublasLtMatmulAlgoGetHeuristic");
    load(library, algorithm_check, "cublasLtMatmulAlgoCheck");
    load(library, config_get, "cublasLtMatmulAlgoConfigGetAttribute");
    load(library, matmul, "cublasLtMatmul");
    load(library, status_string, "cublasLtGetStatusString");
    load(library, status_name, "cublasLtGetStatusName");
    load(library, version, "cublasLtGetVersion");
}

CublasLt::~CublasLt() {
    if (handle_) destroy(handle_);
}

void* CublasLt::handle() {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!handle_) {
        const int status = create(&handle_);
        if (status != kSuccess) {
            handle_ = nullptr;
            throw Error(
                status,
                explain(status, "cublasLtCreate") +
                    ". A CUDA context must be current on this thread: initialise the device first "
                    "(torch.cuda.init(), torch.cuda.set_device)");
        }
    }
    return handle_;
}

std::string CublasLt::explain(int status, const char* call, const std::string& about) const {
    std::string words =
        std::string(call) + ": " + status_name(status) + ", " + status_string(status);
    if (status == kOutOfMemory) words += "; the device is out of memory: use smaller batches";
    return about.empty() ? words : about + ": " + words;
}

void CublasLt::expect(int status, const char* call, const std::string& about) const {
    if (status != kSuccess) throw Error(status, explain(status, call, about));
}

uint32_t CublasLt::reduction_scheme(const Algorithm& algorithm) const {
    uint32_t scheme = 0;
    size_t written = 0;
    expect(config_get(&algorithm, kConfigReductionScheme, &scheme, sizeof scheme, &written),
           "cublasLtMatmulAlgoConfigGetAttribute");
    return scheme;
}

MatrixProduct::MatrixProduct(std::shared_ptr<CublasLt> library, const ProductSpec& spec)
    : library_(std::move(library)), spec_(spec), desc_(nullptr, library_->desc_destroy),
      a_(nullptr, library_->layout_destroy), b_(nullptr, library_->layout_destroy),
      out_(nullptr, library_->layout_destroy) {
    const bool integers = spec.type == static_cast<int64_t>(DataType::kInt8);
    const bool int32_out = spec.out_type == static_cast<int64_t>(DataType::kInt32);
    scale_type_ =
        static_cast<int32_t>(integers && int32_out ? DataType::kInt32 : DataType::kFloat32);

    void* desc = nullptr;
    expect(library_->desc_create(&desc, integers ? kCompute32I : kCompute32F, scale_type_),
           "cublasLtMatmulDescCreate");
    desc_.reset(desc);
    const auto attribute = [&](DescAttribute which, int32_t value) {
        expect(set(library_->desc_set, desc, which, value), "cublasLtMatmulDescSetAttribute");
    };
    // Row-major [N,K] is column-major [K,N]: transposed, it is op(A)[N,K]. Our a [M,K] is
    // op(B)[K,M] as it lies.
    attribute(kDescTransposeA, spec.transpose_b ? kPlain : kTransposed);
    attribute(kDescTransposeB, spec.transpose_a ? kTransposed : kPlain);

    a_ = spec.transpose_a ? layout(spec.type, spec.m, spec.k, spec.leading_a)
                          : layout(spec.type, spec.k, spec.m, spec.leading_a);
    b_ = spec.transpose_b ? layout(spec.type, spec.n, spec.k, spec.leading_b)
                          : layout(spec.type, spec.k, spec.n, spec.leading_b);
    out_ = layout(spec.out_type, spec.n, spec.m, spec.leading_out);
}

void MatrixProduct::expect(int status, const char* call) const {
    library_->expect(status, call, describe());
}

MatrixProduct::Descriptor MatrixProduct::layout(int64_t type, int64_t rows, int64_t columns,
                                                int64_t leading) const {
    void* made = nullptr;
    expect(library_->layout_create(&made, static_cast<int32_t>(type), rows, columns, leading),
           "cublasLtMatrixLayoutCreate");
    return Descriptor(made, library_->layout_destroy);
}

// Parts of a split K must not be rounded or saturated to the output's type before they are summed.
uint32_t MatrixProduct::reduction_schemes() const {
    const bool exact = spec_.out_type == static_cast<int64_t>(DataType::kInt32) ||
                       spec_.out_type == static_cast<int64_t>(DataType::kFloat32);
    return exact ? kReduceAnyhow : kReduceInComputeType;
}

std::vector<Candidate> MatrixProduct::candidates(size_t workspace_bytes, int limit) const {
    void* made = nullptr;
    expect(library_->preference_create(&made), "cublasLtMatmulPreferenceCreate");
    const Descriptor preference(made, library_->preference_destroy);
    const auto prefer = [&](int32_t attribute, auto value) {
        expect(set(library_->preference_set, made, attribute, value),
               "cublasLtMatmulPreferenceSetAttribute");
    };
    prefer(kPreferenceWorkspace, static_cast<uint64_t>(workspace_bytes));
    prefer(kPreferenceReductionSchemes, reduction_schemes());
    for (int32_t i = kPreferenceFirstAlignment; i <= kPreferenceLastAlignment; ++i)
        prefer(i, kOperandAlignment);

    std::vector<Candidate> proposed(limit);
    int count = 0;
    expect(library_->get_heuristic(library_->handle(), desc_.get(), b_.get(), a_.get(), out_.get(),
                                   out_.get(), made, limit, proposed.data(), &count),
           "cublasLtMatmulAlgoGetHeuristic");
    proposed.resize(count);
    const auto failed = [](const Candidate& candidate) { return candidate.status != kSuccess; };
    proposed.erase(std::remove_if(proposed.begin(), proposed.end(), failed), proposed.end());
    return proposed;
}

Candidate MatrixProduct::check(const Algorithm& algorithm) const {
    Candidate result{};
    expect(library_->algorithm_check(library_->handle(), desc_.get(), b_.get(), a_.get(),
                                     out_.get(), out_.get(), &algorithm, &result),
           "cublasLtMatmulAlgoCheck");
    const uint32_t scheme = library_->reduction_scheme(algorithm);
    if (scheme & ~reduction_schemes())
        throw Error(kNotSupported,
                    describe() + ": reduction scheme " + std::to_string(scheme) +
                        " rounds parts of the sum to the output type; choose another algorithm");
    result.algorithm = algorithm;
    return result;
}

void MatrixProduct::choose(const Algorithm& algorithm) {
    chosen_ = check(algorithm);
    handle_ = library_->handle();
}

int MatrixProduct::run(const void* a, const void* b, void* out, void* workspace,
                       size_t workspace_bytes, void* stream) const noexcept {
    if (!handle_) return kNotInitialized;
    if (!a || !b || !out || !aligned(a, kOperandAlignment) || !aligned(b, kOperandAlignment) ||
        !aligned(out, kOperandAlignment) || !aligned(workspace, kWorkspaceAlignment) ||
        workspace_bytes < chosen_.workspace_bytes || (chosen_.workspace_bytes && !workspace))
        return kInvalidValue;
    static constexpr int32_t kOneInt = 1, kZeroInt = 0;
    static constexpr float kOneFloat = 1.0f, kZeroFloat = 0.0f;
    const bool integers = scale_type_ == static_cast<int32_t>(DataType::kInt32);
    const void* one = integers ? static_cast<const void*>(&kOneInt) : &kOneFloat;
    const void* zero = integers ? static_cast<const void*>(&kZeroInt) : &kZeroFloat;
    return library_->matmul(handle_, desc_.get(), one, b, b_.get(), a, a_.get(), zero, out,
                            out_.get(), out, out_.get(), &chosen_.algorithm, workspace,
                            workspace_bytes, stream);
}

std::string MatrixProduct::describe() const {
    const std::string a =
        spec_.transpose_a ? shape(spec_.k, spec_.m) + "^T" : shape(spec_.m, spec_.k);
    const std::string b =
        spec_.transpose_b ? shape(spec_.k, spec_.n) : shape(spec_.n, spec_.k) + "^T";
    const std::string operands = std::string(name(spec_.type)) + " " + a + " x " + b;
    return operands + " -> " + name(spec_.out_type) + " " + shape(spec_.m, spec_.n);
}

std::string MatrixProduct::explain(int status) const {
    std::string words = library_->explain(status, "cublasLtMatmul", describe());
    if (status == kNotInitialized && !handle_)
        words += "; no algorithm was chosen for this product";
    if (status == kInvalidValue)
        words += "; operands must lie at multiples of 16 bytes and the workspace, at least " +
                 std::to_string(chosen_.workspace_bytes) + " bytes, at a multiple of 256";
    return words;
}

}  // namespace lsq
