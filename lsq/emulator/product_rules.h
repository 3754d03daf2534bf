// What the emulated libcublasLt refuses, and the algorithms that it offers.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "product_arithmetic.h"

namespace emulator {

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

// What the 64 bytes of an algorithm hold here: its configuration, and the types that it was made
// for.
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

// The algorithms that this library knows.
struct Variant {
    int32_t id;
    uint32_t alignment;
    size_t workspace;  // beside that of split K
    bool for_floats;
};
constexpr Variant kVariants[] = {
    {66, 256, 0, true}, {21, 16, 0, true}, {23, 16, size_t{4} << 20, false}, {0, 16, 0, true}};

inline uint32_t checksum(const Algorithm& algorithm) {
    uint32_t value = 2166136261u;
    const auto* bytes = reinterpret_cast<const unsigned char*>(&algorithm);
    for (size_t i = 0; i < offsetof(Algorithm, checksum); ++i)
        value = (value ^ bytes[i]) * 16777619u;
    return value;
}

inline const Variant* variant(const Algorithm* algorithm) {
    if (!algorithm || algorithm->magic != kMagic || algorithm->checksum != checksum(*algorithm))
        return nullptr;
    for (const Variant& known : kVariants)
        if (known.id == algorithm->id) return &known;
    return nullptr;
}

inline bool types_supported(int32_t compute, int32_t scale, int32_t a, int32_t b, int32_t c,
                            int32_t d) {
    if (a != b || c != d) return false;
    const bool exact = scale == kInt32 && d == kInt32, scaled = scale == kFloat32 && d == kInt8;
    if (compute == kCompute32I) return a == kInt8 && (exact || scaled);
    const bool floats = a == kFloat32 || a == kBfloat16;
    return compute == kCompute32F && scale == kFloat32 && floats && (d == a || d == kFloat32);
}

inline bool runs(const Variant& known, int32_t type) { return type == kInt8 || known.for_floats; }

inline int describe(const Desc* desc, const Layout* a, const Layout* b, const Layout* c,
                    const Layout* d, Problem& problem) {
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
    const bool integers = a->type == kInt8,
               vector = desc->pointer_mode == kAlphaDeviceVectorBetaHost;
    if (desc->pointer_mode != kHost && !(vector && integers && desc->scale == kFloat32))
        return kNotSupported;
    const bool even = (m | k | a->leading | b->leading | d->leading) % 4 == 0;
    return integers && !(desc->transpose_a == 1 && desc->transpose_b == 0 && even) ? kNotSupported
                                                                                   : kSuccess;
}

// Whether an algorithm runs a problem, and with which workspace.
inline int fits(const Problem& problem, const Algorithm* algorithm, Candidate& result) {
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

inline Algorithm configured(int32_t id, const int32_t* types, uint32_t tile, uint32_t stages,
                            int32_t split_k, uint32_t scheme) {
    Algorithm algorithm{kMagic, id, tile, split_k, scheme, stages, {}, 0, {}};
    std::copy_n(types, 4, algorithm.types);
    algorithm.checksum = checksum(algorithm);
    return algorithm;
}

}  // namespace emulator
