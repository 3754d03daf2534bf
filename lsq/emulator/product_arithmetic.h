// Arithmetic of the emulated libcublasLt, column-major: exact int8 sums, double sums of floats,
// rounded once.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#pragma GCC optimize( \
    "O3")  // the emulator is built for quick compiling; these loops must be vectorised

namespace emulator {

enum Type { kFloat32 = 0, kInt8 = 3, kInt32 = 10, kBfloat16 = 14 };
enum Compute { kCompute32F = 68, kCompute32I = 72 };

struct Desc {
    int32_t compute, scale, transpose_a, transpose_b;
};
struct Layout {
    int32_t type;
    uint64_t rows, columns;
    int64_t leading;
};
// A product as its descriptors describe it: D[m,n] = op(A)[m,k] * op(B)[k,n].
struct Problem {
    Desc desc;
    Layout a, b, d;
    int64_t m, n, k;
};

inline size_t bytes_of(int32_t type) { return type == kInt8 ? 1 : type == kBfloat16 ? 2 : 4; }

inline float widened(uint16_t bits) {
    const uint32_t wide = uint32_t{bits} << 16;
    float value;
    std::memcpy(&value, &wide, sizeof value);
    return value;
}

// A sum rounded once, half to even, to bfloat16.
inline uint16_t narrowed(double sum) {
    // Bits of the fraction, and the least exponent of a normal number.
    constexpr int bits = 7, smallest = -126;
    constexpr uint16_t infinity = 0x7F80;
    const uint16_t sign = std::signbit(sum) ? 0x8000 : 0;
    if (std::isnan(sum)) return sign | infinity | 1 << (bits - 1);
    if (std::isinf(sum)) return sign | infinity;
    const int exponent = sum == 0 ? smallest : std::max(std::ilogb(sum), smallest);
    const auto steps =
        static_cast<int64_t>(std::nearbyint(std::ldexp(std::fabs(sum), bits - exponent)));
    const int64_t code = (static_cast<int64_t>(exponent - smallest) << bits) + steps;
    return sign | static_cast<uint16_t>(std::min<int64_t>(code, infinity));
}

struct Job {
    Problem problem;
    const char *a, *b;
    char* d;
    void* workspace;
    size_t workspace_bytes;
};

inline int32_t dot(const int8_t* a, const int8_t* b, int64_t k) {
    int32_t sum = 0;
    int64_t i = 0;
    for (; i + 64 <= k; i += 64) {
        int32_t part = 0;
        for (int j = 0; j < 64; ++j) part += a[i + j] * b[i + j];
        sum += part;
    }
    for (; i < k; ++i) sum += a[i] * b[i];
    return sum;
}

inline double dot(const double* a, const double* b, int64_t k) {
    double parts[8] = {}, sum = 0;
    int64_t i = 0;
    for (; i + 8 <= k; i += 8)
        for (int j = 0; j < 8; ++j) parts[j] += a[i + j] * b[i + j];
    for (; i < k; ++i) sum += a[i] * b[i];
    for (double part : parts) sum += part;
    return sum;
}

inline void multiply_integers(const Job& job, const int8_t* a, const int8_t* b, char* d) {
    const Problem& p = job.problem;
    for (int64_t column = 0; column < p.n; ++column) {
        for (int64_t row = 0; row < p.m; ++row) {
            const int32_t sum = dot(a + row * p.a.leading, b + column * p.b.leading, p.k);
            reinterpret_cast<int32_t*>(d)[column * p.d.leading + row] = sum;
        }
    }
}

// Copies the rows or columns that sums run along: line `line` at [line * k].
inline std::vector<double> lines(const char* operand, const Layout& layout, int64_t count,
                                 int64_t k, bool contiguous) {
    std::vector<double> values(static_cast<size_t>(count * k));
    for (int64_t line = 0; line < count; ++line)
        for (int64_t i = 0; i < k; ++i) {
            const int64_t at = contiguous ? line * layout.leading + i : i * layout.leading + line;
            values[line * k + i] = layout.type == kFloat32
                                       ? reinterpret_cast<const float*>(operand)[at]
                                       : widened(reinterpret_cast<const uint16_t*>(operand)[at]);
        }
    return values;
}

inline void multiply_floats(const Job& job, const char* a, const char* b, char* d) {
    const Problem& p = job.problem;
    const std::vector<double> left = lines(a, p.a, p.m, p.k, p.desc.transpose_a);
    const std::vector<double> right = lines(b, p.b, p.n, p.k, !p.desc.transpose_b);
    for (int64_t column = 0; column < p.n; ++column) {
        for (int64_t row = 0; row < p.m; ++row) {
            const double sum = dot(&left[row * p.k], &right[column * p.k], p.k);
            const int64_t at = column * p.d.leading + row;
            if (p.d.type == kFloat32) {
                reinterpret_cast<float*>(d)[at] = static_cast<float>(sum);
            } else {
                reinterpret_cast<uint16_t*>(d)[at] = narrowed(sum);
            }
        }
    }
}

inline void multiply(const Job& job) {
    const Problem& p = job.problem;
    if (p.a.type == kInt8) {
        multiply_integers(job, reinterpret_cast<const int8_t*>(job.a),
                          reinterpret_cast<const int8_t*>(job.b), job.d);
    } else {
        multiply_floats(job, job.a, job.b, job.d);
    }
}

}  // namespace emulator
