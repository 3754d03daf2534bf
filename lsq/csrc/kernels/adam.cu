// Adam on float32 master weights, one read and one write of everything; the new weight leaves as int8 codes as well.
//
// Kingma & Ba 2015 with decoupled decay (Loshchilov & Hutter 2019), in the form of fairseq: bias correction is part of
// the step size, and epsilon is added to the plain square root. N rows, K columns. lsq/ops/adam.py is the reference.
#include "reduce.cuh"
#include "transpose.cuh"

namespace {

constexpr int kThreads = 256, kWarps = kThreads / kWarp;

struct Step {
    float size, first, second, epsilon, decay, factor;  // first, second: 1 - beta1, 1 - beta2

    explicit __device__ __forceinline__ Step(const float* scalars)
        : size(scalars[0]), first(scalars[1]), second(scalars[2]), epsilon(scalars[3]), decay(scalars[4]),
          factor(scalars[5]) {}

    __device__ __forceinline__ void apply(float& weight, float gradient, float& m, float& v) const {
        const float g = gradient * factor;
        m = m * (1.0f - first) + g * first;
        v = v * (1.0f - second) + g * second * g;
        weight = weight - weight * decay;
        weight = weight - m / (sqrtf(v) + epsilon) * size;
    }
};

struct Moments {
    float4 weight, gradient, m, v;

    __device__ __forceinline__ void apply(const Step& step) {
        step.apply(weight.x, gradient.x, m.x, v.x);
        step.apply(weight.y, gradient.y, m.y, v.y);
        step.apply(weight.z, gradient.z, m.z, v.z);
        step.apply(weight.w, gradient.w, m.w, v.w);
    }
};

__device__ __forceinline__ bool any_nan(const float4& x) {
    return x.x != x.x || x.y != x.y || x.z != x.z || x.w != x.w;
}

constexpr int kTileRows = 4 * kWarps, kTileColumns = 4 * kWarp;  // of a block; a thread takes 4 x 4

}  // namespace

LSQ_KERNEL __launch_bounds__(kThreads, 4) lsq_adam(const Adam op) {
    const int64_t element = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * 4;
    const float *weight = op.weight, *gradient = op.gradient, *first = op.first, *second = op.second;
    float *new_weight = op.new_weight, *new_first = op.new_first, *new_second = op.new_second;
    const Step step(op.numbers);
    if (element + 4 <= op.numel) {
        Moments values{load_words<float4>(weight + element), load_words<float4>(gradient + element),
                       load_words<float4>(first + element), load_words<float4>(second + element)};
        values.apply(step);
        store_words(new_weight + element, values.weight);
        store_words(new_first + element, values.m);
        store_words(new_second + element, values.v);
        return;
    }
    for (int64_t i = element; i < op.numel; ++i) {
        float w = weight[i], m = first[i], v = second[i];
        step.apply(w, gradient[i], m, v);
        new_weight[i] = w, new_first[i] = m, new_second[i] = v;
    }
}
LSQ_EXPORT(lsq_adam)

// The same for [valid, K], and its codes; rows from `valid` on are padding with codes 0 and scale 1. Scales are written
// anew where a weight is NaN.
LSQ_KERNEL __launch_bounds__(kThreads) lsq_adam_codes(const Adam op, Out<uint32_t> ticket) {
    const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
    const int64_t row = static_cast<int64_t>(blockIdx.x) * kTileRows + 4 * warp;
    const int64_t column = static_cast<int64_t>(blockIdx.y) * kTileColumns + 4 * lane;
    const int64_t valid = op.valid, rows = op.rows, columns = op.columns;
    const float *weights = op.weight, *gradients = op.gradient, *ms = op.first, *vs = op.second;
    const float* limits = op.rounded.clip;
    float *updated = op.new_weight, *new_ms = op.new_first, *new_vs = op.new_second, *scales = op.rounded.scale;
    int8_t *out = op.rounded.codes, *transposed = op.transposed;
    const float largest = op.rounded.largest;
    const Step step(op.numbers);
    Moments values[4];
#pragma unroll
    for (int r = 0; r < 4; ++r) {
        if (row + r >= valid || column >= columns) continue;
        const int64_t element = (row + r) * columns + column;
        values[r] = {load_words<float4>(weights + element), load_words<float4>(gradients + element),
                     load_words<float4>(ms + element), load_words<float4>(vs + element)};
    }
    uint32_t word[4] = {};  // the codes of each row, then of each column
    bool missing = false;
#pragma unroll
    for (int r = 0; r < 4; ++r) {
        if (row + r >= rows || column >= columns) continue;
        const int64_t element = (row + r) * columns + column;
        float limit = largest;  // so that padding has scale 1
        if (row + r < valid) {
            limit = limits[op.clips > 1 ? row + r : 0];
            values[r].apply(step);
            store_words(updated + element, values[r].weight);
            store_words(new_ms + element, values[r].m);
            store_words(new_vs + element, values[r].v);
            missing |= any_nan(values[r].weight);
            const float x[4] = {values[r].weight.x, values[r].weight.y, values[r].weight.z, values[r].weight.w};
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int8_t code = code_of(x[i] / (limit / largest), largest);
                word[r] |= static_cast<uint32_t>(static_cast<uint8_t>(code)) << (8 * i);
            }
        }
        if (column == 0) scales[row + r] = limit / largest;
        store_words(out + element, word[r]);
    }
    if (transposed) {
        // Column 4 * lane + i lies at place 32 * i + lane, 9 words apart, so that a warp writes to 32 banks.
        __shared__ uint32_t tile[kTileColumns * (kWarps + 1)];
        transpose_bytes(word);
#pragma unroll
        for (int i = 0; i < 4; ++i) tile[(kWarp * i + lane) * (kWarps + 1) + warp] = word[i];
        __syncthreads();
        const int place = threadIdx.x / 2, half = threadIdx.x % 2;
        const int64_t out_row = static_cast<int64_t>(blockIdx.y) * kTileColumns + 4 * (place % kWarp) + place / kWarp;
        const int64_t out_column = static_cast<int64_t>(blockIdx.x) * kTileRows + 16 * half;
        if (out_row < columns && out_column < rows) {
            const uint32_t* from = tile + place * (kWarps + 1) + 4 * half;
            store_words(transposed + (out_row * rows + out_column), make_uint4(from[0], from[1], from[2], from[3]));
        }
    }
    // Which rows are NaN is only looked up once training has gone wrong.
    const bool last = last_block<kThreads>(ticket, missing);
    if (!last || !missing) return;
    for (int64_t poisoned_row = warp; poisoned_row < valid; poisoned_row += kWarps) {
        bool found = op.clips == 1;
        for (int64_t i = 4 * lane; i < columns && op.clips > 1; i += 4 * kWarp) {
            found |= any_nan(load_words<float4>(updated + (poisoned_row * columns + i)));
        }
        found = __any_sync(kAllLanes, found);
        if (found && lane == 0) scales[poisoned_row] = not_a_number();
    }
}
LSQ_EXPORT(lsq_adam_codes)
