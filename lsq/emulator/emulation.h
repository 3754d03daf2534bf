// The part of CUDA C++ that kernels use, for a C++17 compiler.
//
// Blocks run one at a time, the threads of a block as fibers that switch only at barriers and warp
// collectives. build.py turns declarations of shared memory into C++ after preprocessing. A file
// may hold no other writable global variable: before each block, all are filled with 0xFF bytes.
#pragma once

#include "services.h"
#include "tensor_core.h"

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(bytes) alignas(bytes)

// The caller's line.
#define EMULATOR_SITE emulator::Site site = {__builtin_FILE(), __builtin_LINE()}

struct uint3 { unsigned x, y, z; };
struct alignas(8) int2 { int x, y; };
struct alignas(8) uint2 { unsigned x, y; };
struct alignas(8) float2 { float x, y; };
struct alignas(16) int4 { int x, y, z, w; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(16) float4 { float x, y, z, w; };

inline int2 make_int2(int x, int y) { return {x, y}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

// A GPU instruction: called, so that profiles count one.
#define EMULATOR_INSTRUCTION inline __attribute__((noinline))

// Constant as long as one thread runs.
extern "C" EMULATOR_VISIBLE const uint3 threadIdx, blockIdx, blockDim, gridDim;

// Declared as glibc declares them; <cmath> would take longer to read than most kernels.
extern "C" {
float rintf(float) noexcept;
float nearbyintf(float) noexcept;
float floorf(float) noexcept;
float ceilf(float) noexcept;
float fabsf(float) noexcept;
float fmaxf(float, float) noexcept;
float fminf(float, float) noexcept;
float fmaf(float, float, float) noexcept;
float sqrtf(float) noexcept;
float logf(float) noexcept;
float nextafterf(float, float) noexcept;
double sqrt(double) noexcept;
}

#define EMULATOR_MIN_MAX(type)                                \
    inline type min(type a, type b) { return b < a ? b : a; } \
    inline type max(type a, type b) { return a < b ? b : a; }
EMULATOR_MIN_MAX(int)
EMULATOR_MIN_MAX(unsigned)
EMULATOR_MIN_MAX(long)
EMULATOR_MIN_MAX(unsigned long)
EMULATOR_MIN_MAX(long long)
EMULATOR_MIN_MAX(unsigned long long)
#undef EMULATOR_MIN_MAX
inline float min(float a, float b) { return fminf(a, b); }
inline float max(float a, float b) { return fmaxf(a, b); }

namespace emulator {

template <typename To, typename From>
inline To reinterpret(From value) {
    static_assert(sizeof(To) == 4 && sizeof(From) == 4, "only 32-bit values");
    To result;
    __builtin_memcpy(&result, &value, 4);
    return result;
}

template <typename T>
inline T shuffle(const char* name, unsigned mask, T value, unsigned source, Site site) {
    return reinterpret<T>(emulator_collective(Collective::shuffle, name, mask,
                                              reinterpret<unsigned>(value), source, site));
}

}  // namespace emulator

inline unsigned __float_as_uint(float x) { return emulator::reinterpret<unsigned>(x); }
inline float __uint_as_float(unsigned x) { return emulator::reinterpret<float>(x); }
inline unsigned __umulhi(unsigned a, unsigned b) { return static_cast<uint64_t>(a) * b >> 32; }

// The sum, rounded down.
EMULATOR_INSTRUCTION float __fadd_rd(float a, float b) {
    // Exact: Knuth's two-sum.
    const float sum = a + b, of_b = sum - a, lost = (a - (sum - of_b)) + (b - of_b);
    return lost < 0.0f ? nextafterf(sum, -__builtin_inff()) : sum;
}

// Four of the bytes of a (0 to 3) and b (4 to 7), by the digits of `choice`, the lowest first.
EMULATOR_INSTRUCTION unsigned __byte_perm(unsigned a, unsigned b, unsigned choice) {
    const uint64_t bytes = static_cast<uint64_t>(b) << 32 | a;
    unsigned chosen = 0;
    for (int i = 0; i < 4; ++i) {
        chosen |= static_cast<unsigned>(bytes >> (8 * (choice >> (4 * i) & 7)) & 0xFF) << (8 * i);
    }
    return chosen;
}

// sum plus the products of the bytes of a and b, as signed numbers.
EMULATOR_INSTRUCTION int __dp4a(int a, int b, int sum) {
    for (int i = 0; i < 32; i += 8)
        sum += static_cast<signed char>(a >> i) * static_cast<signed char>(b >> i);
    return sum;
}

// The larger of two magnitudes, NaN if one is.
EMULATOR_INSTRUCTION float emulator_larger_magnitude(float a, float b) {
    const float first = __builtin_fabsf(a), second = __builtin_fabsf(b);
    if (a != a || b != b) return __uint_as_float(0x7FFFFFFFu);
    return first > second ? first : second;
}

inline void __threadfence() {}

// No thread switches between load and store.
#define EMULATOR_ATOMIC inline __attribute__((no_sanitize_thread))

EMULATOR_ATOMIC unsigned atomicAdd(unsigned* address, unsigned value) {
    emulator_atomic(address, sizeof value);
    const unsigned before = *address;
    *address = before + value;
    return before;
}

EMULATOR_ATOMIC unsigned atomicExch(unsigned* address, unsigned value) {
    emulator_atomic(address, sizeof value);
    const unsigned before = *address;
    *address = value;
    return before;
}

EMULATOR_ATOMIC unsigned atomicMax(unsigned* address, unsigned value) {
    emulator_atomic(address, sizeof value);
    const unsigned before = *address;
    *address = before > value ? before : value;
    return before;
}

inline void __syncthreads(EMULATOR_SITE) { emulator_barrier(site); }

// bar.sync and bar.arrive
inline void emulator_sync_barrier(int barrier, int count, EMULATOR_SITE) {
    emulator_named_barrier(barrier, count, true, site);
}
inline void emulator_arrive_barrier(int barrier, int count, EMULATOR_SITE) {
    emulator_named_barrier(barrier, count, false, site);
}

inline void __syncwarp(unsigned mask = 0xffffffff, EMULATOR_SITE) {
    emulator_collective(emulator::Collective::synchronize, "__syncwarp", mask, 0, 0, site);
}

inline unsigned __ballot_sync(unsigned mask, int predicate, EMULATOR_SITE) {
    return emulator_collective(emulator::Collective::ballot, "__ballot_sync", mask, predicate != 0,
                               0, site);
}

inline int __any_sync(unsigned mask, int predicate, EMULATOR_SITE) {
    return emulator_collective(emulator::Collective::ballot, "__any_sync", mask, predicate != 0, 0,
                               site) != 0;
}

inline int __all_sync(unsigned mask, int predicate, EMULATOR_SITE) {
    return emulator_collective(emulator::Collective::ballot, "__all_sync", mask, predicate != 0, 0,
                               site) == mask;
}

// Shuffles act within groups of `width` lanes, a power of two; sources beyond are the lane itself.
template <typename T>
inline T __shfl_sync(unsigned mask, T value, int source, int width = 32, EMULATOR_SITE) {
    const unsigned group = emulator_lane() & ~(width - 1u);
    return emulator::shuffle("__shfl_sync", mask, value, group | (source & (width - 1u)), site);
}

template <typename T>
inline T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32, EMULATOR_SITE) {
    const unsigned lane = emulator_lane(), within = lane & (width - 1u);
    return emulator::shuffle("__shfl_up_sync", mask, value, delta > within ? lane : lane - delta,
                             site);
}

template <typename T>
inline T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32, EMULATOR_SITE) {
    const unsigned lane = emulator_lane(), within = lane & (width - 1u);
    return emulator::shuffle("__shfl_down_sync", mask, value,
                             delta >= width - within ? lane : lane + delta, site);
}

template <typename T>
inline T __shfl_xor_sync(unsigned mask, T value, int bits, int width = 32, EMULATOR_SITE) {
    const unsigned lane = emulator_lane(), source = lane ^ bits,
                   beyond = (lane & ~(width - 1u)) + width;
    return emulator::shuffle("__shfl_xor_sync", mask, value, source >= beyond ? lane : source,
                             site);
}

// Vector loads and stores: one access, aligned on a GPU, which compilers would split.
#define EMULATOR_VECTOR __attribute__((noinline, no_sanitize_thread))

template <typename Word>
EMULATOR_VECTOR Word emulator_load(const void* from, EMULATOR_SITE) {
    if (reinterpret_cast<uintptr_t>(from) % sizeof(Word))
        emulator_misaligned(from, sizeof(Word), site);
    emulator_read(from, sizeof(Word), __builtin_return_address(0));
    return *static_cast<const Word*>(from);
}

template <typename Word>
EMULATOR_VECTOR void emulator_store(void* to, const Word& words, EMULATOR_SITE) {
    if (reinterpret_cast<uintptr_t>(to) % sizeof(Word)) emulator_misaligned(to, sizeof(Word), site);
    emulator_write(to, sizeof(Word), __builtin_return_address(0));
    *static_cast<Word*>(to) = words;
}

extern "C" {

extern __attribute__((visibility("hidden"))) unsigned char __bss_start[], _end[];

// The linker puts the shared variables of a module, and nothing else, between these two symbols.
EMULATOR_VISIBLE emulator::Memory emulator_static_shared() { return {__bss_start, _end}; }

}  // extern "C"

namespace emulator {

struct Arguments {
    void** next;

    // Copies of the driver are nobody's memory.
    template <typename T>
    EMULATOR_VECTOR T read() { return *static_cast<T*>(*next++); }
};

// Calls a kernel. Braces evaluate the values from left to right.
struct Call {
    template <typename... T>
    Call(void (*kernel)(T...), T... values) { kernel(values...); }
};

template <typename... T>
inline void call(void (*kernel)(T...), void** arguments) {
    static_assert((__is_trivially_copyable(T) && ...), "arguments are copied byte by byte");
    [[maybe_unused]] Arguments left{arguments};
    Call{kernel, left.read<T>()...};
}

// The bytes of each parameter, ended by 0.
template <typename... T>
inline const size_t* parameters(void (*)(T...)) {
    static constexpr size_t bytes[] = {sizeof(T)..., 0};
    return bytes;
}

}  // namespace emulator

// Follows each kernel: its symbols for the driver, one thread's run and the sizes of parameters.
#define LSQ_EXPORT(kernel)                                                \
    extern "C" EMULATOR_VISIBLE void kernel##__launch(void** arguments) { \
        emulator::call(kernel, arguments);                                \
    }                                                                     \
    extern "C" EMULATOR_VISIBLE const size_t* kernel##__parameters() {    \
        return emulator::parameters(kernel);                              \
    }
