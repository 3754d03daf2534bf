// Instructions that several threads do together.
#pragma once

#include "machine.h"

namespace ptx {

// Of a warp: the thread waits for the lanes of the mask in slot `e` (all without one).
void with_warp(Thread& thread, const Instruction& i);

void perform_shuffle(Warp& warp, uint32_t lanes, const Instruction& i);
void perform_vote(Warp& warp, uint32_t lanes, const Instruction& i);
void perform_warp_barrier(Warp& warp, uint32_t lanes, const Instruction& i);
void perform_matrix_load(Warp& warp, uint32_t lanes, const Instruction& i);

// Products of fragments: Layouts of the instruction's operands are CuTe's, in `layouts`.
void perform_integer_product(Warp& warp, uint32_t lanes, const Instruction& i);
void perform_float_product(Warp& warp, uint32_t lanes, const Instruction& i);
void perform_sparse_product(Warp& warp, uint32_t lanes, const Instruction& i);

void perform_warpgroup_fence(Warp& warp, uint32_t lanes, const Instruction& i);
void perform_warpgroup_product(Warp& warp, uint32_t lanes, const Instruction& i);
void perform_warpgroup_commit(Warp& warp, uint32_t lanes, const Instruction& i);
void perform_warpgroup_wait(Warp& warp, uint32_t lanes, const Instruction& i);

// Of a block: barrier in slot `a`, number of threads in slot `b`, or all. `flag`: it does not wait.
void with_block(Thread& thread, const Instruction& i);
void perform_arrival(Warp& warp, uint32_t lanes, const Instruction& i);

// Shows what the thread has written to the asynchronous proxy.
void fence_proxy(Thread& thread, const Instruction& i);

}  // namespace ptx
