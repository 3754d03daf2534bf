// Types, pointers and the emulator's stand-ins, for every kernel file.
//
// No CUDA header is needed. A kernel takes the struct of its operation (operations.h, see
// lsq/native/declarations.py), In<T>, Out<T>, int64_t and float. -D specialises a kernel; FLOAT is
// the dtype of activations and their gradients: 0 float32, 1 bfloat16.
#pragma once

#ifdef LSQ_EMULATOR
#include "emulation.h"
#else
#define LSQ_EXPORT(kernel)
#endif

#include "arithmetic.h"

#define LSQ_KERNEL extern "C" __global__ void

namespace lsq {

struct bfloat16 {
    uint16_t bits;
};

#ifndef FLOAT
#define FLOAT 0
#endif
#if FLOAT == 0
using Float = float;
#elif FLOAT == 1
using Float = bfloat16;
#else
#error "FLOAT is 0 (float32) or 1 (bfloat16)"
#endif

// Waits until all launches before have ended and what they wrote can be read, and lets the next one
// start its blocks. The first statement of every kernel: Driver::launch (runtime/driver.h) does not
// wait.
LSQ_INLINE void wait_for_launches() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;\ngriddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// An address on the device.
template <class T>
struct Pointer {
    uint64_t address;

    LSQ_INLINE operator T*() const { return reinterpret_cast<T*>(address); }
    LSQ_INLINE explicit operator bool() const { return address != 0; }
};
template <class T>
using In = Pointer<const T>;
template <class T>
using Out = Pointer<T>;

constexpr int kWarp = 32;

// A or B, by a -D.
template <bool FIRST, class A, class B>
struct Choice {
    using type = A;
};
template <class A, class B>
struct Choice<false, A, B> {
    using type = B;
};
template <bool FIRST, class A, class B>
using Select = typename Choice<FIRST, A, B>::type;

}  // namespace lsq

#include "operations.h"

using namespace lsq;
