// Warps that take turns by barriers.cuh; `fault` plants one, 0 none.
#include "barriers.cuh"
#include "tensor_core.cuh"

using namespace lsq;

constexpr int kStages = 2, kRow = 32, kAll = 96;

LSQ_INLINE int full(int stage) { return 1 + stage; }
LSQ_INLINE int empty(int stage) { return 1 + kStages + stage; }

// out [64] = sums of x [steps, 32], columns reversed, twice: a warp copies rows to a ring, and two
// others add them up.
LSQ_KERNEL ring(In<uint32_t> x, Out<uint32_t> out, int64_t steps, int64_t fault) {
    alignas(16) __shared__ uint32_t stages[kStages][kRow];
    const int lane = threadIdx.x % 32;
    if (threadIdx.x < 32) {
        for (int step = 0; step < steps; ++step) {
            const int stage = step % kStages;
            if (step >= kStages && fault == 3) arrive_barrier<kAll>(empty(stage));
            if (step >= kStages && fault != 3 && fault != 4) sync_barrier<kAll>(empty(stage));
            copy_async<4>(stages[stage] + lane, x + kRow * step + lane);
            commit_copies();
            if (fault != 5) wait_copies<0>();
            if (fault != 2) arrive_barrier<kAll>(full(stage));
            if (fault == 6 && lane == 5) stages[stage][lane] = 0;  // which has been handed over
        }
        return;
    }
    uint32_t sum = 0;
    for (int step = 0; step < steps; ++step) {
        const int stage = step % kStages;
        if (fault == 1) arrive_barrier<kAll>(full(stage));  // and does not wait
        if (fault != 1 && fault != 2) sync_barrier<kAll>(full(stage));
        sum += stages[stage][31 - lane];
        if (step + kStages < steps && fault != 4) arrive_barrier<kAll>(empty(stage));
    }
    out[threadIdx.x - 32] = sum;
}
LSQ_EXPORT(ring)

// out [64]: words that two groups of two warps share; in its turn, thread t of a group adds t + 1
// to word 63 - t.
LSQ_KERNEL turns(Out<uint32_t> out, int64_t rounds, int64_t fault) {
    __shared__ uint32_t words[64];
    const int group = threadIdx.x / 64, thread = threadIdx.x % 64;
    if (group == 0) words[thread] = 0;
    __syncthreads();
    if (group == 1) arrive_barrier<128>(1);  // the first group begins
    for (int round = 0; round < rounds; ++round) {
        sync_barrier<128>(1 + group);
        words[63 - thread] += thread + 1;
        const bool last = group == 1 && round + 1 == rounds;
        if (!last) arrive_barrier<128>(2 - group);
        if (fault && group == 0) out[thread] = words[thread];  // its turn is over
    }
    __syncthreads();
    if (group == 0) out[thread] = words[thread];
}
LSQ_EXPORT(turns)

// out [128]: what other threads of a group of two warps have left; 1: with one barrier for both
// groups.
LSQ_KERNEL groups(Out<uint32_t> out, int64_t fault) {
    __shared__ uint32_t words[128];
    words[threadIdx.x] = threadIdx.x;
    sync_barrier<64>(fault ? 1 : 1 + threadIdx.x / 64);
    out[threadIdx.x] = words[threadIdx.x ^ 63];
}
LSQ_EXPORT(groups)

// Three warps read a word, which warp 0 overwrites when `readers` of them have come.
template <int READERS>
LSQ_INLINE void read_and_overwrite(uint32_t* out) {
    __shared__ uint32_t word;
    constexpr int kThreads = 32 + 32 * READERS;
    const int warp = threadIdx.x / 32;
    if (threadIdx.x == 0) word = 7;
    __syncthreads();
    if (warp) out[threadIdx.x] = word;
    if (warp && warp <= READERS) arrive_barrier<kThreads>(15);
    if (warp == 0) sync_barrier<kThreads>(15), word = 8;
    __syncthreads();
    if (warp == 0) out[threadIdx.x] = word;
}

LSQ_KERNEL overwritten(Out<uint32_t> out, int64_t readers) {
    if (readers == 2) read_and_overwrite<2>(out);
    if (readers == 3) read_and_overwrite<3>(out);
}
LSQ_EXPORT(overwritten)
