// Biases of scores by the distance of key and query, and their gradient; see PositionBias in
// lsq/ops/heads.py.
//
// -DDISTANCES, if there are biases: how many distances have one of their own, from -DBUCKETS rows
// of a table.
#pragma once

#include "attention_tiles.cuh"

namespace lsq {

#ifdef DISTANCES
constexpr bool kBiased = true;
#else
constexpr bool kBiased = false;
#endif

// What is added to scores of one head for the distance of key and query.
struct Biases {
#ifdef DISTANCES
    static constexpr int kLimit = DISTANCES / 2;
    float line[DISTANCES];

    // All threads of the block must call this, and meet before they read the line.
    __device__ __forceinline__ void load(const Heads& heads, int head) {
        __syncthreads();  // the line before has been read
        for (int i = threadIdx.x; i < DISTANCES; i += kThreads) {
            line[i] = heads.bias.table[heads.bias.bucket[i] * heads.count + head];
        }
    }

    __device__ __forceinline__ static int place(int distance) {
        return max(-kLimit, min(distance, kLimit)) + kLimit;
    }
    __device__ __forceinline__ float add(float score, int distance) const {
        return score + line[place(distance)];
    }
#else
    __device__ __forceinline__ void load(const Heads&, int) {}
    __device__ __forceinline__ float add(float score, int) const { return score; }
#endif
};

// The gradient of biases: what the block's tiles add to each bucket of one head.
struct BiasSums {
#ifdef DISTANCES
    float diagonal[2 * TILE - 1], sum[BUCKETS];

    __device__ __forceinline__ void clear() {
        for (int bucket = threadIdx.x; bucket < BUCKETS; bucket += kThreads) sum[bucket] = 0.0f;
    }

    // Adds the gradients of scores [queries, keys]; distance: of the first key from the first
    // query. A thread adds up diagonals, then buckets, each in order. All threads of the block must
    // call this.
    __device__ __forceinline__ void add(const PositionBias& bias, const PairTile& slopes,
                                        int queries, int keys, int distance) {
        for (int i = threadIdx.x; i < 2 * TILE - 1; i += kThreads) {
            float total = 0.0f;
            for (int query = 0; query < queries; ++query) {
                const int key = query + i - (TILE - 1);
                if (key < 0 || key >= keys) continue;
#pragma unroll
                for (int part = 0; part < kParts; ++part) {
                    total +=
                        widen(*reinterpret_cast<const bfloat16*>(slopes.at(part, query, 2 * key)));
                }
            }
            diagonal[i] = total;
        }
        __syncthreads();
        for (int bucket = threadIdx.x; bucket < BUCKETS; bucket += kThreads) {
            for (int i = 0; i < 2 * TILE - 1; ++i) {
                const int place = Biases::place(distance + i - (TILE - 1));
                if (bias.bucket[place] == bucket) sum[bucket] += diagonal[i];
            }
        }
    }

    __device__ __forceinline__ void write(const Heads& heads, int head, float* out) const {
        for (int bucket = threadIdx.x; bucket < BUCKETS; bucket += kThreads) {
            out[(blockIdx.x * BUCKETS + bucket) * heads.count + head] = sum[bucket];
        }
    }
#else
    __device__ __forceinline__ void clear() {}
    __device__ __forceinline__ void add(const PositionBias&, const PairTile&, int, int, int) {}
    __device__ __forceinline__ void write(const Heads&, int, float*) const {}
#endif
};

}  // namespace lsq
