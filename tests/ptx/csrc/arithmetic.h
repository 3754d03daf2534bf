// Arithmetic of PTX: one function for each operation, of one type.
#pragma once

#include <cfenv>
#include <cmath>
#include <limits>
#include <type_traits>

#include "machine.h"

namespace ptx {

// Rounds in another direction while it lives.
struct Rounding {
    bool changed;
    explicit Rounding(int mode) : changed(mode != FE_TONEAREST) {
        if (changed) std::fesetround(mode);
    }
    ~Rounding() {
        if (changed) std::fesetround(FE_TONEAREST);
    }
};

// Results that are NaN are one NaN.
template <class T>
T canonical(T x) {
    if constexpr (std::is_same_v<T, float>) {
        const uint32_t bits = 0x7fffffff;
        if (x != x) std::memcpy(&x, &bits, 4);
    }
    return x;
}

template <class T>
using Unsigned = std::make_unsigned_t<T>;

struct Add {
    template <class T>
    static T of(T a, T b) {
        if constexpr (std::is_floating_point_v<T>)
            return canonical(a + b);
        else
            return static_cast<T>(static_cast<Unsigned<T>>(a) + static_cast<Unsigned<T>>(b));
    }
};
struct Subtract {
    template <class T>
    static T of(T a, T b) {
        if constexpr (std::is_floating_point_v<T>)
            return canonical(a - b);
        else
            return static_cast<T>(static_cast<Unsigned<T>>(a) - static_cast<Unsigned<T>>(b));
    }
};
struct Multiply {  // integers: the low half
    template <class T>
    static T of(T a, T b) {
        if constexpr (std::is_floating_point_v<T>)
            return canonical(a * b);
        else
            return static_cast<T>(static_cast<uint64_t>(a) * static_cast<uint64_t>(b));
    }
};
struct MultiplyHigh {
    template <class T>
    static T of(T a, T b) {
        using Wide = std::conditional_t<std::is_signed_v<T>, __int128, unsigned __int128>;
        return static_cast<T>(static_cast<Wide>(a) * static_cast<Wide>(b) >> 8 * sizeof(T));
    }
};
struct Divide {
    template <class T>
    static T of(T a, T b) {
        if constexpr (std::is_floating_point_v<T>)
            return canonical(a / b);
        else {
            if (b == 0) throw Error("a division by zero");
            if constexpr (std::is_signed_v<T>)
                if (b == -1) return Subtract::of(T{0}, a);
            return a / b;
        }
    }
};
struct Remainder {
    template <class T>
    static T of(T a, T b) {
        return static_cast<T>(Subtract::of(a, Multiply::of(Divide::of(a, b), b)));
    }
};
// Of floats: the other one if one is NaN; -0 is smaller than 0.
struct Minimum {
    template <class T>
    static T of(T a, T b) {
        if constexpr (std::is_floating_point_v<T>) {
            if (a != a || b != b) return canonical(a != a ? b : a);
            if (a == b) return std::signbit(a) ? a : b;
        }
        return b < a ? b : a;
    }
};
struct Maximum {
    template <class T>
    static T of(T a, T b) {
        if constexpr (std::is_floating_point_v<T>) {
            if (a != a || b != b) return canonical(a != a ? b : a);
            if (a == b) return std::signbit(a) ? b : a;
        }
        return a < b ? b : a;
    }
};
template <class Other>
struct OrNaN {
    template <class T>
    static T of(T a, T b) {
        return a != a || b != b ? canonical(std::numeric_limits<T>::quiet_NaN()) : Other::of(a, b);
    }
};
struct And {
    template <class T>
    static T of(T a, T b) {
        return a & b;
    }
};
struct Or {
    template <class T>
    static T of(T a, T b) {
        return a | b;
    }
};
struct Xor {
    template <class T>
    static T of(T a, T b) {
        return a ^ b;
    }
};

struct Negate {
    template <class T>
    static T of(T a) {
        if constexpr (std::is_floating_point_v<T>)
            return -a;
        else
            return Subtract::of(T{0}, a);
    }
};
struct Absolute {
    template <class T>
    static T of(T a) {
        if constexpr (std::is_floating_point_v<T>)
            return std::fabs(a);
        else
            return a < 0 ? Negate::of(a) : a;
    }
};
struct Not {
    template <class T>
    static T of(T a) {
        return ~a;
    }
};
struct SquareRoot {
    template <class T>
    static T of(T a) {
        return canonical(std::sqrt(a));
    }
};
struct Reciprocal {
    template <class T>
    static T of(T a) {
        return canonical(T{1} / a);
    }
};
struct FusedMultiplyAdd {
    template <class T>
    static T of(T a, T b, T c) {
        return canonical(std::fma(a, b, c));
    }
};
struct MultiplyAdd {
    template <class T>
    static T of(T a, T b, T c) {
        return Add::of(Multiply::of(a, b), c);
    }
};
struct MultiplyHighAdd {
    template <class T>
    static T of(T a, T b, T c) {
        return Add::of(MultiplyHigh::of(a, b), c);
    }
};

struct ShiftLeft {
    template <class T>
    static T of(T a, uint32_t by) {
        return by < 8 * sizeof(T) ? static_cast<T>(a << by) : T{0};
    }
};
struct ShiftRight {  // T is signed: with the sign
    template <class T>
    static T of(T a, uint32_t by) {
        const uint32_t last = 8 * sizeof(T) - 1;
        return by <= last ? static_cast<T>(a >> by) : a < T{0} ? static_cast<T>(-1) : T{0};
    }
};

enum class Compare { EQ, NE, LT, LE, GT, GE, EQU, NEU, LTU, LEU, GTU, GEU, NUM, NAN_ };

template <Compare HOW>
struct Compared {
    template <class T>
    static bool of(T a, T b) {
        const bool either = a != a || b != b;
        switch (HOW) {
            case Compare::EQ: return a == b;
            case Compare::NE: return !either && a != b;
            case Compare::LT: return a < b;
            case Compare::LE: return a <= b;
            case Compare::GT: return a > b;
            case Compare::GE: return a >= b;
            case Compare::EQU: return either || a == b;
            case Compare::NEU: return either || a != b;
            case Compare::LTU: return either || a < b;
            case Compare::LEU: return either || a <= b;
            case Compare::GTU: return either || a > b;
            case Compare::GEU: return either || a >= b;
            case Compare::NUM: return !either;
            default: return either;
        }
    }
};

// A float rounded to the bits of a bfloat16; `mode`: to nearest even, or towards zero.
inline uint16_t bits_of_bfloat16(float x, int mode) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    if (x != x) return 0x7fff;
    if (mode == FE_TONEAREST) bits += 0x7fff + (bits >> 16 & 1);
    return static_cast<uint16_t>(bits >> 16);
}

// A value rounded to a whole number.
template <class T>
T whole(T x, int mode) {
    switch (mode) {
        case FE_TOWARDZERO: return std::trunc(x);
        case FE_DOWNWARD: return std::floor(x);
        case FE_UPWARD: return std::ceil(x);
        default: return std::nearbyint(x);
    }
}

// To an integer: the nearest one that there is; NaN becomes 0.
template <class To, class From>
To integer_of(From x, int mode) {
    if (x != x) return 0;
    const From rounded = whole(x, mode);
    constexpr auto lowest = std::numeric_limits<To>::lowest(),
                   highest = std::numeric_limits<To>::max();
    if (rounded <= static_cast<From>(lowest)) return lowest;
    if (rounded >= static_cast<From>(highest)) return highest;
    return static_cast<To>(rounded);
}

}  // namespace ptx
