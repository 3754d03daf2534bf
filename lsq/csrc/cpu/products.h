// Products of small float matrices that lie in a core's caches: out [M, N] (+)= a [M, K] b [K, N].
//
// Rows of `b` and `out` are whole panels of columns, aligned to 64 bytes; what lies beyond the columns that count is
// worked on as well. Every element is summed in the order of k, whatever the other sizes are.
#pragma once

#include <cstdint>
#include <memory>
#include <new>
#include <type_traits>
#include <utility>

namespace lsq {

#if defined(__AVX512F__)
constexpr int64_t kLanes = 16, kTileRows = 8;
#elif defined(__AVX2__)
constexpr int64_t kLanes = 8, kTileRows = 4;
#else
constexpr int64_t kLanes = 4, kTileRows = 4;
#endif
constexpr int64_t kPanel = 2 * kLanes;  // columns of `out` that are worked on together
constexpr int64_t kDepth = 256;         // rows of a panel that stay in the first cache meanwhile

typedef float Lanes __attribute__((vector_size(4 * kLanes), may_alias));

inline int64_t panels(int64_t columns) { return (columns + kPanel - 1) / kPanel; }
inline int64_t whole_panels(int64_t columns) { return panels(columns) * kPanel; }

// Element (m, k) stands at data[m * stride + k], or at data[k * stride + m] if TRANSPOSED.
template <bool TRANSPOSED>
struct Left {
    const float* data;
    int64_t stride;

    float operator()(int64_t m, int64_t k) const { return data[TRANSPOSED ? k * stride + m : m * stride + k]; }
    Left from(int64_t m, int64_t k) const { return {data + (TRANSPOSED ? k * stride + m : m * stride + k), stride}; }
};

// Element (k, n) stands at data[n / kPanel * panel + k * stride + n % kPanel].
struct Right {
    const float* data;
    int64_t stride, panel;
};

// A matrix with rows of `stride` numbers as the right factor.
inline Right rows_of(const float* data, int64_t stride) { return {data, stride, kPanel}; }

template <int ROWS, bool TRANSPOSED>
void multiply_tile(const Left<TRANSPOSED>& a, const float* b, int64_t b_stride, int64_t depth, bool add, float* out,
                   int64_t out_stride) {
    Lanes sum[ROWS][2];
    for (int m = 0; m < ROWS; ++m) {
        const Lanes* old = reinterpret_cast<const Lanes*>(out + m * out_stride);
        sum[m][0] = add ? old[0] : Lanes{};
        sum[m][1] = add ? old[1] : Lanes{};
    }
    for (int64_t k = 0; k < depth; ++k) {
        const Lanes* row = reinterpret_cast<const Lanes*>(b + k * b_stride);
        const Lanes low = row[0], high = row[1];
        for (int m = 0; m < ROWS; ++m) {
            const Lanes factor = a(m, k) - Lanes{};
            sum[m][0] += factor * low;
            sum[m][1] += factor * high;
        }
    }
    for (int m = 0; m < ROWS; ++m) {
        Lanes* to = reinterpret_cast<Lanes*>(out + m * out_stride);
        to[0] = sum[m][0];
        to[1] = sum[m][1];
    }
}

// out [rows, whole_panels(columns)], rows `out_stride` apart; added to what stands there if `add`.
template <bool TRANSPOSED>
void multiply(const Left<TRANSPOSED>& a, const Right& b, int64_t rows, int64_t columns, int64_t inner, bool add,
              float* out, int64_t out_stride) {
    for (int64_t k = 0; k == 0 || k < inner; k += kDepth) {
        const int64_t depth = inner - k < kDepth ? inner - k : kDepth;
        for (int64_t panel = 0; panel < panels(columns); ++panel) {
            const float* from = b.data + panel * b.panel + k * b.stride;
            const auto tile = [&](auto count, int64_t m) {
                multiply_tile<count.value, TRANSPOSED>(
                    a.from(m, k), from, b.stride, depth, add || k, out + m * out_stride + panel * kPanel, out_stride);
                return m + count.value;
            };
            int64_t m = 0;
            while (rows - m >= kTileRows) m = tile(std::integral_constant<int, kTileRows>{}, m);
            if (rows - m >= 4) m = tile(std::integral_constant<int, 4>{}, m);
            if (rows - m >= 2) m = tile(std::integral_constant<int, 2>{}, m);
            if (rows - m >= 1) m = tile(std::integral_constant<int, 1>{}, m);
        }
    }
}

// Transposes kPanel rows of n numbers into [n, kPanel]: each pass rotates the bits of an element's place by one.
// Scratch: 2 * kPanel * n numbers.
inline void transpose_panel(const float* rows, int64_t n, float* out, float* scratch) {
    const int64_t half = kPanel / 2 * n;
    float *next = scratch, *other = scratch + 2 * half;
    for (int64_t left = kPanel; left > 1; left /= 2) {
        float* to = left == 2 ? out : next;
        for (int64_t i = 0; i < half; ++i) {
            to[2 * i] = rows[i];
            to[2 * i + 1] = rows[half + i];
        }
        rows = to;
        std::swap(next, other);
    }
}

// Memory that is aligned to 64 bytes and not cleared.
class AlignedFloats {
public:
    explicit AlignedFloats(int64_t n) : data_(static_cast<float*>(::operator new[](4 * n, std::align_val_t{64}))) {}
    float* get() const { return data_.get(); }

private:
    struct Free {
        void operator()(float* data) const { ::operator delete[](data, std::align_val_t{64}); }
    };
    std::unique_ptr<float, Free> data_;
};

}  // namespace lsq
