// An emulated libcublasLt on host memory: the functions that lsq/csrc/runtime/cublaslt.cpp calls.
//
// It refuses what cublasLtMatmul's documentation forbids, and more: operands that are not at
// multiples of 16 bytes, a missing algorithm (a hidden lookup), algorithms of others. Its
// algorithms differ in configuration and workspace, and compute the same. Calls are counted, and
// fail on demand. A product goes to a stream of the emulated driver, which knows contexts, captures
// and users of memory.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <type_traits>

#include "product_arithmetic.h"
#include "services.h"

#define LSQ_EXPORT extern "C" EMULATOR_VISIBLE

using namespace emulator;

namespace {

enum Status {
    kSuccess = 0,
    kNotInitialized = 1,
    kInvalidValue = 7,
    kExecutionFailed = 13,
    kNotSupported = 15
};
enum Scheme { kNone = 0, kInPlace = 1, kComputeType = 2, kOutputType = 4 };

struct Candidate {
    uint64_t algorithm[8];
    size_t workspace;
    int32_t status;
    float waves;
    int32_t reserved[4];
};

// An algorithm's 64 bytes: its configuration and types.
struct Algorithm {
    uint32_t magic;
    int32_t id;
    uint32_t tile;
    int32_t split_k;
    uint32_t scheme, stages;
    int32_t types[4];
    uint32_t checksum, unused[5];
};
static_assert(sizeof(Algorithm) == 64 && sizeof(Candidate) == 96, "the layout of cublasLt.h");
constexpr uint32_t kMagic = 0x1a7e5c0d;

struct Variant {
    int32_t id;
    uint32_t alignment;
    size_t workspace;  // beside that of split K
    bool for_floats;
};
constexpr Variant kVariants[] = {
    {66, 256, 0, true}, {21, 16, 0, true}, {23, 16, size_t{4} << 20, false}, {0, 16, 0, true}};

uint32_t checksum(const Algorithm& algorithm) {
    uint32_t value = 2166136261u;
    const auto* bytes = reinterpret_cast<const unsigned char*>(&algorithm);
    for (size_t i = 0; i < offsetof(Algorithm, checksum); ++i)
        value = (value ^ bytes[i]) * 16777619u;
    return value;
}

const Variant* variant(const Algorithm* algorithm) {
    if (!algorithm || algorithm->magic != kMagic || algorithm->checksum != checksum(*algorithm))
        return nullptr;
    for (const Variant& known : kVariants)
        if (known.id == algorithm->id) return &known;
    return nullptr;
}

bool types_supported(int32_t compute, int32_t scale, int32_t a, int32_t b, int32_t c, int32_t d) {
    if (a != b || c != d) return false;
    if (compute == kCompute32I) return a == kInt8 && scale == kInt32 && d == kInt32;
    const bool floats = a == kFloat32 || a == kBfloat16;
    return compute == kCompute32F && scale == kFloat32 && floats && (d == a || d == kFloat32);
}

bool runs(const Variant& known, int32_t type) { return type == kInt8 || known.for_floats; }

int describe(const Desc* desc, const Layout* a, const Layout* b, const Layout* c, const Layout* d,
             Problem& problem) {
    if (!desc || !a || !b || !d || c != d) return kInvalidValue;
    const auto size = [](uint64_t value) { return static_cast<int64_t>(value); };
    const int64_t m = size(d->rows), n = size(d->columns),
                  k = size(desc->transpose_a ? a->rows : a->columns);
    problem = {*desc, *a, *b, *d, m, n, k};
    const bool fits = size(desc->transpose_a ? a->columns : a->rows) == m && m > 0 && n > 0 &&
                      k > 0 && size(desc->transpose_b ? b->columns : b->rows) == k &&
                      size(desc->transpose_b ? b->rows : b->columns) == n;
    const bool spaced =
        a->leading >= size(a->rows) && b->leading >= size(b->rows) && d->leading >= m;
    if (!fits || !spaced) return kInvalidValue;
    if (!types_supported(desc->compute, desc->scale, a->type, b->type, c->type, d->type))
        return kNotSupported;
    const bool integers = a->type == kInt8;
    const bool even = (m | k | a->leading | b->leading | d->leading) % 4 == 0;
    return integers && !(desc->transpose_a == 1 && desc->transpose_b == 0 && even) ? kNotSupported
                                                                                   : kSuccess;
}

// Whether an algorithm runs a problem, and with which workspace.
int fits(const Problem& problem, const Algorithm* algorithm, Candidate& result) {
    const Variant* known = variant(algorithm);
    if (!known) return kInvalidValue;
    const Desc& desc = problem.desc;
    const int32_t types[4] = {desc.compute, desc.scale, problem.a.type, problem.d.type};
    if (std::memcmp(types, algorithm->types, sizeof types) != 0) return kInvalidValue;
    const bool split = algorithm->split_k > 1;
    if (split && problem.k % (16 * algorithm->split_k) != 0) return kNotSupported;
    const size_t outputs = static_cast<size_t>(problem.m * problem.n);
    const size_t part = algorithm->scheme == kComputeType  ? 4 * outputs
                        : algorithm->scheme == kOutputType ? bytes_of(problem.d.type) * outputs
                                                           : 1024;
    std::memcpy(result.algorithm, algorithm, sizeof *algorithm);
    result.workspace = known->workspace + (split ? part * algorithm->split_k : 0);
    result.status = kSuccess;
    return kSuccess;
}

Algorithm configured(int32_t id, const int32_t* types, uint32_t tile, uint32_t stages,
                     int32_t split_k, uint32_t scheme) {
    Algorithm algorithm{kMagic, id, tile, split_k, scheme, stages, {}, 0, {}};
    std::copy_n(types, 4, algorithm.types);
    algorithm.checksum = checksum(algorithm);
    return algorithm;
}

struct PlannedFailure {
    int32_t status;
    int64_t times;
};

std::mutex mutex;
std::map<std::string, int64_t> counts;
std::map<std::string, PlannedFailure> failures;

// Counts a call. -> its planned failure, or kSuccess
int called(const char* function) {
    std::lock_guard<std::mutex> lock(mutex);
    ++counts[function];
    const auto planned = failures.find(function);
    if (planned == failures.end() || planned->second.times == 0) return kSuccess;
    --planned->second.times;
    return planned->second.status;
}

struct Preference {
    uint64_t workspace;
    uint32_t schemes, alignment[4];
};
struct Handle {
    const void* context;
};

template <typename Field>
int take(Field& field, const void* value, size_t bytes) {
    if (!value || bytes != sizeof field) return kInvalidValue;
    std::memcpy(&field, value, bytes);
    return kSuccess;
}

bool misaligned(const void* pointer, uintptr_t bytes) {
    return reinterpret_cast<uintptr_t>(pointer) % bytes != 0;
}

const char* touch(const Layout& layout, const void* matrix, bool writes) {
    const size_t bytes = bytes_of(layout.type);
    const char* first = static_cast<const char*>(matrix);
    for (uint64_t column = 0; column < layout.columns; ++column) {
        const char* at = first + column * layout.leading * bytes;
        if (const char* fault = emulator_use(at, layout.rows * bytes, writes)) return fault;
    }
    return nullptr;
}

// A Job, on its stream.
const char* run_product(const void* data) {
    Job job;
    std::memcpy(&job, data, sizeof job);
    const Problem& problem = job.problem;
    const char* fault = touch(problem.a, job.a, false);
    if (!fault) fault = touch(problem.b, job.b, false);
    if (!fault) fault = emulator_use(job.workspace, job.workspace_bytes, true);
    if (!fault) fault = touch(problem.d, job.d, true);
    if (!fault) multiply(job);
    return fault;
}

}  // namespace

LSQ_EXPORT int cublasLtCreate(Handle** handle) {
    if (const int failure = called("cublasLtCreate")) return failure;
    *handle = new Handle{emulator_context()};
    return kSuccess;
}

LSQ_EXPORT int cublasLtDestroy(Handle* handle) {
    delete handle;
    return called("cublasLtDestroy");
}

LSQ_EXPORT int cublasLtMatmulDescCreate(Desc** desc, int32_t compute, int32_t scale) {
    *desc = new Desc{compute, scale, 0, 0};
    return called("cublasLtMatmulDescCreate");
}

LSQ_EXPORT int cublasLtMatmulDescSetAttribute(Desc* desc, int32_t attribute, const void* value,
                                              size_t bytes) {
    switch (attribute) {
        case 3: return take(desc->transpose_a, value, bytes);
        case 4: return take(desc->transpose_b, value, bytes);
    }
    return kInvalidValue;
}

LSQ_EXPORT int cublasLtMatmulDescDestroy(Desc* desc) {
    delete desc;
    return called("cublasLtMatmulDescDestroy");
}

LSQ_EXPORT int cublasLtMatrixLayoutCreate(Layout** layout, int32_t type, uint64_t rows,
                                          uint64_t columns, int64_t leading) {
    *layout = new Layout{type, rows, columns, leading};
    return called("cublasLtMatrixLayoutCreate");
}

LSQ_EXPORT int cublasLtMatrixLayoutDestroy(Layout* layout) {
    delete layout;
    return called("cublasLtMatrixLayoutDestroy");
}

LSQ_EXPORT int cublasLtMatmulPreferenceCreate(Preference** preference) {
    *preference = new Preference{0, 7, {256, 256, 256, 256}};
    return called("cublasLtMatmulPreferenceCreate");
}

LSQ_EXPORT int cublasLtMatmulPreferenceSetAttribute(Preference* preference, int32_t attribute,
                                                    const void* value, size_t bytes) {
    if (attribute == 1) return take(preference->workspace, value, bytes);
    if (attribute == 3) return take(preference->schemes, value, bytes);
    if (attribute >= 5 && attribute <= 8)
        return take(preference->alignment[attribute - 5], value, bytes);
    return kInvalidValue;
}

LSQ_EXPORT int cublasLtMatmulPreferenceDestroy(Preference* preference) {
    delete preference;
    return called("cublasLtMatmulPreferenceDestroy");
}

LSQ_EXPORT int cublasLtMatmulAlgoGetHeuristic(Handle* handle, const Desc* desc, const Layout* a,
                                              const Layout* b, const Layout* c, const Layout* d,
                                              const Preference* preference, int requested,
                                              Candidate* candidates, int* returned) {
    if (const int failure = called("cublasLtMatmulAlgoGetHeuristic")) return failure;
    if (!handle) return kNotInitialized;
    if (!preference || !candidates || !returned || requested <= 0) return kInvalidValue;
    *returned = 0;
    Problem problem;
    if (const int refused = describe(desc, a, b, c, d, problem)) return refused;
    const int32_t types[4] = {desc->compute, desc->scale, a->type, d->type};
    const Algorithm ideas[] = {
        configured(66, types, 23, 36, 1, kNone),
        configured(21, types, 20, 14, 1, kNone),
        configured(21, types, 20, 14, 2, kOutputType),
        configured(21, types, 18, 15, 2, kComputeType),
        configured(23, types, 23, 35, 1, kNone),
        configured(21, types, 15, 13, 4, kInPlace),
        configured(0, types, 15, 0, 1, kNone),
    };
    const uint32_t alignment = *std::min_element(preference->alignment, preference->alignment + 4);
    for (const Algorithm& idea : ideas) {
        Candidate result{};
        if (*returned < requested && variant(&idea)->alignment <= alignment &&
            !(idea.scheme & ~preference->schemes) && runs(*variant(&idea), a->type) &&
            fits(problem, &idea, result) == kSuccess && result.workspace <= preference->workspace)
            candidates[(*returned)++] = result;
    }
    return kSuccess;
}

LSQ_EXPORT int cublasLtMatmulAlgoCheck(Handle* handle, const Desc* desc, const Layout* a,
                                       const Layout* b, const Layout* c, const Layout* d,
                                       const Algorithm* algorithm, Candidate* result) {
    if (const int failure = called("cublasLtMatmulAlgoCheck")) return failure;
    if (!handle) return kNotInitialized;
    Problem problem;
    if (const int refused = describe(desc, a, b, c, d, problem)) return refused;
    return fits(problem, algorithm, *result);
}

LSQ_EXPORT int cublasLtMatmulAlgoConfigGetAttribute(const Algorithm* algorithm, int32_t attribute,
                                                    void* value, size_t bytes, size_t* written) {
    constexpr int32_t kScheme = 3;
    if (!variant(algorithm) || attribute != kScheme) return kInvalidValue;
    if (!value || bytes < sizeof algorithm->scheme) return kInvalidValue;
    std::memcpy(value, &algorithm->scheme, sizeof algorithm->scheme);
    if (written) *written = sizeof algorithm->scheme;
    return kSuccess;
}

LSQ_EXPORT int cublasLtMatmul(Handle* handle, const Desc* desc, const void* alpha, const void* a,
                              const Layout* a_layout, const void* b, const Layout* b_layout,
                              const void* beta, const void* c, const Layout* c_layout, void* d,
                              const Layout* d_layout, const Algorithm* algorithm, void* workspace,
                              size_t workspace_bytes, void* stream) {
    if (const int failure = called("cublasLtMatmul")) return failure;
    if (!handle) return kNotInitialized;
    emulator_context();  // a thread that has none gets one
    Job job{};
    if (const int refused = describe(desc, a_layout, b_layout, c_layout, d_layout, job.problem))
        return refused;
    Candidate result{};
    if (const int refused = fits(job.problem, algorithm, result)) return refused;
    const uint32_t alignment = variant(algorithm)->alignment;
    if (!a || !b || !d || c != d || !alpha || !beta || misaligned(a, alignment) ||
        misaligned(b, alignment) || misaligned(d, alignment) || misaligned(workspace, 256) ||
        workspace_bytes < result.workspace || (result.workspace && !workspace))
        return kInvalidValue;
    const auto number = [integers = desc->scale == kInt32](const void* at) {
        return integers ? static_cast<float>(*static_cast<const int32_t*>(at))
                        : *static_cast<const float*>(at);
    };
    if (number(alpha) != 1 || number(beta) != 0) return kNotSupported;
    job.a = static_cast<const char*>(a);
    job.b = static_cast<const char*>(b);
    job.d = static_cast<char*>(d);
    job.workspace = workspace;
    job.workspace_bytes = result.workspace;
    static_assert(std::is_trivially_copyable_v<Job>, "a capture keeps copies");
    return emulator_submit(handle->context, stream, "a product", run_product, &job, sizeof job)
               ? kExecutionFailed
               : kSuccess;
}

LSQ_EXPORT const char* cublasLtGetStatusString(int status) {
    return status == kExecutionFailed ? emulator_message() : "said by the emulated library";
}

LSQ_EXPORT size_t cublasLtGetVersion() { return 131000; }

LSQ_EXPORT const char* cublasLtGetStatusName(int status) {
    switch (status) {
        case 0: return "CUBLAS_STATUS_SUCCESS";
        case 1: return "CUBLAS_STATUS_NOT_INITIALIZED";
        case 3: return "CUBLAS_STATUS_ALLOC_FAILED";
        case 7: return "CUBLAS_STATUS_INVALID_VALUE";
        case 8: return "CUBLAS_STATUS_ARCH_MISMATCH";
        case 13: return "CUBLAS_STATUS_EXECUTION_FAILED";
        case 15: return "CUBLAS_STATUS_NOT_SUPPORTED";
    }
    return "unrecognized status";
}

// Number of calls of a function that creates, destroys, looks up, checks or runs.
LSQ_EXPORT int64_t emulated_calls(const char* function) {
    std::lock_guard<std::mutex> lock(mutex);
    return counts[function];
}

// The next `times` calls of a function return `status` and do nothing.
LSQ_EXPORT void emulated_fail(const char* function, int64_t status, int64_t times) {
    std::lock_guard<std::mutex> lock(mutex);
    failures[function] = {static_cast<int32_t>(status), times};
}
