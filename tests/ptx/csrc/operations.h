// What instructions of one thread do.
#pragma once

#include <algorithm>

#include "arithmetic.h"

namespace ptx {

template <class F, class T>
void unary(Thread& t, const Instruction& i) {
    const Rounding mode(i.rounding);
    set(t, i.d, F::of(get<T>(t, i.a)));
}
template <class F, class T>
void binary(Thread& t, const Instruction& i) {
    const Rounding mode(i.rounding);
    try {
        set(t, i.d, F::of(get<T>(t, i.a), get<T>(t, i.b)));
    } catch (const Error& error) {
        fault(t, i, error.what());
    }
}
template <class F, class T>
void ternary(Thread& t, const Instruction& i) {
    const Rounding mode(i.rounding);
    set(t, i.d, F::of(get<T>(t, i.a), get<T>(t, i.b), get<T>(t, i.c)));
}
template <class F, class T>
void shift(Thread& t, const Instruction& i) {
    set(t, i.d, F::of(get<T>(t, i.a), get<uint32_t>(t, i.b)));
}
template <class T, class Wide>
void multiply_wide(Thread& t, const Instruction& i) {
    const Wide product = static_cast<Wide>(get<T>(t, i.a)) * static_cast<Wide>(get<T>(t, i.b));
    set(t, i.d, i.c < 0 ? product : Add::of(product, get<Wide>(t, i.c)));
}
template <class F, class T>
void compare(Thread& t, const Instruction& i) {
    bool found = F::of(get<T>(t, i.a), get<T>(t, i.b));
    if (i.c >= 0) {
        const bool other = (t.r[i.c] & 1) != i.flag;
        found = i.modifier == Modifier::AND  ? found && other
                : i.modifier == Modifier::OR ? found || other
                                             : found != other;
    }
    set<uint32_t>(t, i.d, found);
}

inline void move(Thread& t, const Instruction& i) { t.r[i.d] = t.r[i.a]; }
inline void pack(Thread& t, const Instruction& i) {
    uint64_t word = 0;
    for (size_t part = 0; part < i.as.size(); ++part) word |= t.r[i.as[part]] << part * i.bits;
    t.r[i.d] = word;
}
inline void unpack(Thread& t, const Instruction& i) {
    for (size_t part = 0; part < i.ds.size(); ++part)
        if (i.ds[part] >= 0) t.r[i.ds[part]] = t.r[i.a] >> part * i.bits & ((1ull << i.bits) - 1);
}
inline void select(Thread& t, const Instruction& i) { t.r[i.d] = t.r[(t.r[i.c] & 1) ? i.a : i.b]; }
inline void negate_predicate(Thread& t, const Instruction& i) { t.r[i.d] = !(t.r[i.a] & 1); }

inline void logic(Thread& t, const Instruction& i) {
    const auto a = get<uint32_t>(t, i.a), b = get<uint32_t>(t, i.b), c = get<uint32_t>(t, i.c);
    uint32_t found = 0;
    for (int row = 0; row < 8; ++row)
        if (i.number >> row & 1)
            found |= (row & 4 ? a : ~a) & (row & 2 ? b : ~b) & (row & 1 ? c : ~c);
    set(t, i.d, found);
}
inline void permute(Thread& t, const Instruction& i) {
    const uint64_t bytes = t.r[i.b] << 32 | get<uint32_t>(t, i.a);
    const auto order = get<uint32_t>(t, i.c);
    uint32_t found = 0;
    for (int at = 0; at < 4; ++at) {
        const uint32_t one = order >> 4 * at & 15, byte = bytes >> 8 * (one & 7) & 255;
        found |= (one & 8 ? (byte & 128 ? 255 : 0) : byte) << 8 * at;
    }
    set(t, i.d, found);
}
template <class T>
void insert_bits(Thread& t, const Instruction& i) {
    const uint32_t first = get<uint32_t>(t, i.c) & 255, count = get<uint32_t>(t, i.e) & 255;
    const T ones = count < 8 * sizeof(T) ? static_cast<T>((T{1} << count) - 1) : static_cast<T>(-1);
    const T mask = ShiftLeft::of(ones, first);
    set(t, i.d,
        static_cast<T>((get<T>(t, i.b) & ~mask) | (ShiftLeft::of(get<T>(t, i.a), first) & mask)));
}
template <class T>
void extract_bits(Thread& t, const Instruction& i) {
    const T a = get<T>(t, i.a);
    const int first = t.r[i.b] & 255, count = t.r[i.c] & 255, last = 8 * sizeof(T) - 1;
    const bool sign = std::is_signed_v<T> && count && a >> std::min(first + count - 1, last) & 1;
    std::make_unsigned_t<T> found = 0;
    for (int bit = 0; bit <= last; ++bit) {
        const bool inside = bit < count && first + bit <= last;
        found |= std::make_unsigned_t<T>{inside ? (a >> (first + bit) & 1) != 0 : sign} << bit;
    }
    set(t, i.d, found);
}
inline void dot(Thread& t, const Instruction& i) {
    auto sum = get<uint32_t>(t, i.c);
    for (int byte = 0; byte < 4; ++byte)
        sum += static_cast<uint32_t>(static_cast<int8_t>(t.r[i.a] >> 8 * byte) *
                                     static_cast<int8_t>(t.r[i.b] >> 8 * byte));
    set(t, i.d, sum);
}
// Two halves of a word times the two low bytes of another.
inline void dot_halves(Thread& t, const Instruction& i) {
    auto sum = get<uint32_t>(t, i.c);
    for (int at = 0; at < 2; ++at)
        sum += static_cast<uint32_t>(static_cast<uint16_t>(t.r[i.a] >> 16 * at)) *
               static_cast<uint8_t>(t.r[i.b] >> 8 * at);
    set(t, i.d, sum);
}

template <class To, class From>
void convert(Thread& t, const Instruction& i) {
    const From x = get<From>(t, i.a);
    To found;
    if constexpr (std::is_floating_point_v<From> && !std::is_floating_point_v<To>) {
        found = integer_of<To>(x, i.rounding);
    } else if constexpr (std::is_same_v<From, To> && std::is_floating_point_v<From>) {
        found = i.flag ? canonical(whole(x, i.rounding)) : x;
    } else {
        const Rounding mode(i.rounding);
        found = static_cast<To>(x);
        if constexpr (std::is_floating_point_v<To>) found = canonical(found);
    }
    if constexpr (std::is_integral_v<To>) {  // up to the width of the register
        const auto wide = static_cast<uint64_t>(static_cast<int64_t>(found));
        t.r[i.d] = std::is_signed_v<To> ? (i.bits == 64 ? wide : wide & ((1ull << i.bits) - 1))
                                        : static_cast<uint64_t>(found);
    } else {
        set(t, i.d, found);
    }
}
inline void convert_to_bfloat16(Thread& t, const Instruction& i) {
    set(t, i.d, bits_of_bfloat16(get<float>(t, i.a), i.rounding));
}
inline void convert_to_two_bfloat16(Thread& t, const Instruction& i) {
    const uint32_t high = bits_of_bfloat16(get<float>(t, i.a), i.rounding);
    set(t, i.d, high << 16 | bits_of_bfloat16(get<float>(t, i.b), i.rounding));
}
inline void convert_of_bfloat16(Thread& t, const Instruction& i) {
    set(t, i.d, get<uint32_t>(t, i.a) << 16);
}

inline void to_generic(Thread& t, const Instruction& i) { t.r[i.d] = t.r[i.a] + i.number; }
// Nobody can use what becomes of an address in another space.
inline void from_generic(Thread& t, const Instruction& i) { t.r[i.d] = t.r[i.a] - i.number; }

template <class T>
void load(Thread& t, const Instruction& i) {
    const int count = static_cast<int>(i.ds.size());
    const uint8_t* from =
        reach(t, i, i.space, t.r[i.a] + i.number, count * sizeof(T), Access::READ);
    for (int at = 0; at < count; ++at) {
        T x;
        std::memcpy(&x, from + at * sizeof x, sizeof x);
        if (i.ds[at] < 0) continue;
        auto wide = static_cast<uint64_t>(static_cast<int64_t>(x));
        if (i.bits < 64) wide &= (1ull << i.bits) - 1;
        t.r[i.ds[at]] = std::is_signed_v<T> ? wide : static_cast<uint64_t>(x);
    }
}
template <class T>
void store(Thread& t, const Instruction& i) {
    T values[4];
    const int bytes = static_cast<int>(i.as.size() * sizeof(T));
    for (size_t at = 0; at < i.as.size(); ++at) values[at] = get<T>(t, i.as[at]);
    std::memcpy(reach(t, i, i.space, t.r[i.a] + i.number, bytes, Access::WRITE, values), values,
                bytes);
}
template <class T>
void update(Thread& t, const Instruction& i) {
    uint8_t* at = reach(t, i, i.space, t.r[i.a] + i.number, sizeof(T), Access::UPDATE);
    T old;
    std::memcpy(&old, at, sizeof old);
    T x = get<T>(t, i.b);
    switch (i.modifier) {
        case Modifier::ADD: x = Add::of(old, x); break;
        case Modifier::MIN: x = Minimum::of(old, x); break;
        case Modifier::MAX: x = Maximum::of(old, x); break;
        case Modifier::EXCHANGE: break;
        case Modifier::COMPARE_AND_SWAP: x = old == x ? get<T>(t, i.c) : old; break;
        default:
            if constexpr (std::is_integral_v<T>)
                x = i.modifier == Modifier::AND  ? old & x
                    : i.modifier == Modifier::OR ? old | x
                                                 : old ^ x;
    }
    std::memcpy(at, &x, sizeof x);
    set(t, i.d, old);
}

inline void branch(Thread& t, const Instruction& i) { t.at = i.number; }
inline void end(Thread& t, const Instruction&) {
    t.state = State::EXITED;
    leave(t);
}

inline void copy_async(Thread& t, const Instruction& i) {
    const auto bytes = static_cast<uint32_t>(i.bytes);
    const uint32_t wanted = i.b < 0 ? bytes : get<uint32_t>(t, i.b);
    const uint64_t to = t.r[i.d] + i.number - kSharedFirst, from = t.r[i.a];
    if (wanted > bytes) fault(t, i, "more bytes wanted than copied");
    if (to + bytes > t.block->shared.bytes.size()) fault(t, i, "outside the block's shared memory");
    if (to % bytes || from % bytes) fault(t, i, "no multiple of the bytes that are copied");
    if (wanted) check_global_read(t, i, from, static_cast<int>(wanted));
    begin(t, i, {static_cast<uint32_t>(to), reinterpret_cast<const uint8_t*>(from), bytes, wanted});
}
inline void commit_copies(Thread& t, const Instruction&) {
    t.groups.push_back(std::move(t.copies));
    t.copies.clear();
}
inline void wait_copies(Thread& t, const Instruction& i) {
    while (t.groups.size() > i.number) {
        complete(t, i, t.groups.front());
        t.groups.erase(t.groups.begin());
    }
}
inline void wait_all_copies(Thread& t, const Instruction& i) {
    commit_copies(t, i);
    wait_copies(t, i);
}

}  // namespace ptx
