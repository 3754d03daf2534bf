// The structs of operations with plain pointers and float32.
#pragma once

#include "../include/arithmetic.h"

namespace lsq {

using Float = float;
template <class T>
using Pointer = T*;

}  // namespace lsq

#include "operations.h"

// Defines the loop of an operation: LSQ_OPERATION(Name, op) { ... } takes the struct of that name.
#define LSQ_OPERATION(Name, op) \
    extern "C" __attribute__((visibility("default"))) void lsq_##Name(const lsq::Name& op)
