// Products of small float matrices in a core's caches: out [M, N] (+)= a [M, K] b [K, N].
//
// Matrices have whole units of rows and columns, zero beyond the given sizes (rows of `out` may be
// anything there), and rows aligned to 64 bytes. Sums run in the order of k.
#pragma once

#include <cstdint>
#include <type_traits>

#include "aligned.h"
#include "lanes.h"

namespace lsq {

#if defined(__AVX512F__)
constexpr int64_t kTileRows = 8;
#else
constexpr int64_t kTileRows = 4;
#endif
constexpr int64_t kUnit = 32;           // matrices have whole units of rows and columns
constexpr int64_t kPanel = 2 * kLanes;  // columns of `out` that are worked on together
constexpr int64_t kDepth = 256;         // rows of a panel that stay in the first cache meanwhile

inline int64_t whole_units(int64_t n) { return (n + kUnit - 1) / kUnit * kUnit; }
inline int64_t panels(int64_t columns) { return (columns + kPanel - 1) / kPanel; }

// Source of a factor: at(row, column) reads kLanes numbers. Whole: scratch of whole units, read in
// place.
struct Whole {
    const float* first;
    int64_t stride;

    Lanes at(int64_t row, int64_t column) const {
        return *reinterpret_cast<const Lanes*>(first + row * stride + column);
    }
};

// Rows and columns of a larger matrix of codes or floats; 0 outside.
template <class T>
struct Window {
    const T* first;
    int64_t stride, rows, columns;

    Lanes at(int64_t row, int64_t column) const {
        return row < rows ? load_lanes(first + row * stride + column, columns - column) : Lanes{};
    }
};

// Products by vectors, on any processor.
struct FloatProducts {
    struct Session {};  // what a thread holds while it multiplies

    // Left factor: element (m, k) lies at data[m * stride + k], or at data[k * stride + m] if
    // TRANSPOSED, like its source. Constructors take the largest sizes.
    template <bool TRANSPOSED>
    class Left {
    public:
        const float* data = nullptr;
        int64_t stride = 0;

        Left(int64_t outer, int64_t inner, bool) : copy_(whole_units(outer) * whole_units(inner)) {}

        template <class Source>
        void take(const Source& x, int64_t outer, int64_t inner) {
            stride = whole_units(TRANSPOSED ? outer : inner);
            data = in_place(x, TRANSPOSED ? inner : outer, stride, copy_.get());
        }

        // Fills in rows instead of take(): start(), then put() two vectors of row m from inner
        // index k on.
        void start(int64_t inner) { data = copy_.get(), stride = whole_units(inner); }
        struct Row {
            float* to;
            void put(int64_t k, Lanes low, Lanes high) const {
                lanes_at(to + k) = low;
                lanes_at(to + k + kLanes) = high;
            }
        };
        Row row(int64_t m) const { return {copy_.get() + m * stride}; }

        int64_t index(int64_t m, int64_t k) const {
            return TRANSPOSED ? k * stride + m : m * stride + k;
        }

    private:
        AlignedFloats copy_;
    };

    // Right factor: element (k, n) lies at data[n / kPanel * panel + k * stride + n % kPanel]. The
    // source has it in row k, or in row n if TRANSPOSED.
    template <bool TRANSPOSED>
    class Right {
    public:
        const float* data = nullptr;
        int64_t stride = 0, panel = 0;

        Right(int64_t columns, int64_t inner, bool)
            : copy_(whole_units(columns) * whole_units(inner)) {}

        template <class Source>
        void take(const Source& x, int64_t columns, int64_t inner) {
            if constexpr (TRANSPOSED) {
                data = copy_.get(), stride = kPanel, panel = kPanel * whole_units(inner);
                transpose_from(x, whole_units(columns), whole_units(inner));
            } else {
                stride = whole_units(columns), panel = kPanel;
                data = in_place(x, inner, stride, copy_.get());
            }
        }

    private:
        template <class Source>
        void transpose_from(const Source& x, int64_t columns, int64_t inner) {
            for (int64_t n = 0; n < columns; n += kLanes) {
                for (int64_t k = 0; k < inner; k += kLanes) {
                    Lanes block[kLanes];
                    for (int64_t i = 0; i < kLanes; ++i) block[i] = x.at(n + i, k);
                    transpose(block);
                    float* to = copy_.get() + n / kPanel * panel + k * kPanel + n % kPanel;
                    for (int64_t i = 0; i < kLanes; ++i) lanes_at(to + i * kPanel) = block[i];
                }
            }
        }

        AlignedFloats copy_;
    };

    // out [rows, columns], rows `stride` apart; adds to it if `add`. b starts at inner index
    // `first`.
    template <class A, class B>
    static void multiply(const A& a, const B& b, int64_t rows, int64_t columns, int64_t inner,
                         bool add, float* out, int64_t stride, int64_t first = 0) {
        for (int64_t k = 0; k == 0 || k < inner; k += kDepth) {
            const int64_t depth = inner - k < kDepth ? inner - k : kDepth;
            for (int64_t panel = 0; panel < panels(columns); ++panel) {
                const float* from = b.data + panel * b.panel + (first + k) * b.stride;
                const auto tile = [&](auto count, int64_t m) {
                    float* to = out + m * stride + panel * kPanel;
                    multiply_tile<count.value>(a, m, k, from, b.stride, depth, add || k, to,
                                               stride);
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

private:
    static const float* in_place(const Whole& x, int64_t, int64_t& stride, float*) {
        stride = x.stride;
        return x.first;
    }

    // A copy of whole units, rows `stride` apart.
    template <class Source>
    static const float* in_place(const Source& x, int64_t rows, int64_t& stride, float* copy) {
        for (int64_t row = 0; row < whole_units(rows); ++row) {
            for (int64_t i = 0; i < stride; i += kLanes)
                lanes_at(copy + row * stride + i) = x.at(row, i);
        }
        return copy;
    }

    template <int ROWS, class A>
    static void multiply_tile(const A& a, int64_t first, int64_t first_inner, const float* b,
                              int64_t b_stride, int64_t depth, bool add, float* out,
                              int64_t stride) {
        const float* left = a.data + a.index(first, first_inner);
        Lanes sum[ROWS][2];
        for (int m = 0; m < ROWS; ++m) {
            const Lanes* old = reinterpret_cast<const Lanes*>(out + m * stride);
            sum[m][0] = add ? old[0] : Lanes{};
            sum[m][1] = add ? old[1] : Lanes{};
        }
        for (int64_t k = 0; k < depth; ++k) {
            const Lanes* row = reinterpret_cast<const Lanes*>(b + k * b_stride);
            const Lanes low = row[0], high = row[1];
            for (int m = 0; m < ROWS; ++m) {
                const Lanes factor = all_lanes(left[a.index(m, k)]);
                sum[m][0] = multiply_add(factor, low, sum[m][0]);
                sum[m][1] = multiply_add(factor, high, sum[m][1]);
            }
        }
        for (int m = 0; m < ROWS; ++m) {
            Lanes* to = reinterpret_cast<Lanes*>(out + m * stride);
            to[0] = sum[m][0];
            to[1] = sum[m][1];
        }
    }
};

}  // namespace lsq
