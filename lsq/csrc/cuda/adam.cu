// Adam on float32 master parameters, in one pass; new weights leave as int8 codes as well.
//
// Kingma & Ba 2015 with decoupled decay (Loshchilov & Hutter 2019), in the form of fairseq: the
// step size includes bias correction, epsilon is added to the plain square root. N rows, K columns;
// lsq/ops/adam.py is the reference.
#include "reduce.cuh"
#include "transpose.cuh"

namespace {

constexpr int kThreads = 256, kWarps = kThreads / kWarp;
constexpr int64_t kNormRun = 8192;  // values of a gradient that a block squares

struct Step {
    // First, second: 1 - beta1, 1 - beta2.
    float size, first, second, epsilon, decay, factor, lowest, highest;
    bool limited;

    LSQ_INLINE explicit Step(const Adam& op)
        : lowest(op.lowest), highest(op.highest), limited(op.limited) {
        const float *numbers = op.numbers, *gradient_factor = op.gradient_factor;
        size = numbers[0], first = numbers[1], second = numbers[2], epsilon = numbers[3],
        decay = numbers[4];
        factor = gradient_factor[0];
    }

    LSQ_INLINE void apply(float& weight, float gradient, float& m, float& v) const {
        const float g = gradient * factor;
        m = m * (1.0f - first) + g * first;
        v = v * (1.0f - second) + g * second * g;
        const float decayed = weight - weight * decay;
        const float after = decayed - m / (sqrtf(v) + epsilon) * size;
        const float low = weight * lowest, high = weight * highest;
        const float raised = limited && after < low ? low : after;
        weight = limited && raised > high ? high : raised;
    }
};

struct Moments {
    float4 weight, gradient, m, v;

    LSQ_INLINE void apply(const Step& step) {
        step.apply(weight.x, gradient.x, m.x, v.x);
        step.apply(weight.y, gradient.y, m.y, v.y);
        step.apply(weight.z, gradient.z, m.z, v.z);
        step.apply(weight.w, gradient.w, m.w, v.w);
    }
};

LSQ_INLINE bool any_nan(const float4& x) {
    return x.x != x.x || x.y != x.y || x.z != x.z || x.w != x.w;
}

// Four codes, the first in the lowest byte.
LSQ_INLINE uint32_t codes_of(const float4& x, float scale, float largest) {
    const float values[4] = {x.x, x.y, x.z, x.w};
    uint32_t word = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        word |= static_cast<uint32_t>(static_cast<uint8_t>(code_of(values[i] / scale, largest)))
                << (8 * i);
    }
    return word;
}

// A gradient may be a view that begins anywhere in a bucket.
LSQ_INLINE float4 load_gradient(const float* from) {
    if (reinterpret_cast<uint64_t>(from) % sizeof(float4) == 0) return load_words<float4>(from);
    return {from[0], from[1], from[2], from[3]};
}

// Values of a block without codes.
constexpr int kRun = 4 * kThreads;
constexpr int kTileRows = 4 * kWarps, kTileColumns = 4 * kWarp;  // of a block; a thread takes 4 x 4
constexpr int kAtOnce = 2;

LSQ_INLINE void update(const Adam& op, int64_t tile) {
    const int64_t element = tile * kRun + threadIdx.x * 4, numel = op.numel;
    const float *weight = op.weight, *gradient = op.gradient, *first = op.first,
                *second = op.second;
    float *new_weight = op.new_weight, *new_first = op.new_first, *new_second = op.new_second;
    const Step step(op);
    if (element + 4 <= numel) {
        Moments values{load_words<float4>(weight + element), load_gradient(gradient + element),
                       load_words<float4>(first + element), load_words<float4>(second + element)};
        values.apply(step);
        store_words(new_weight + element, values.weight);
        store_words(new_first + element, values.m);
        store_words(new_second + element, values.v);
        return;
    }
    for (int64_t i = element; i < numel; ++i) {
        float w = weight[i], m = first[i], v = second[i];
        step.apply(w, gradient[i], m, v);
        new_weight[i] = w, new_first[i] = m, new_second[i] = v;
    }
}

// Rows [tile * kTileRows, ...) of a step with codes; rows from `valid` on are padding with codes 0
// and scale 1. A new clip, of the new weights, takes a second pass.
LSQ_INLINE void update_rows(const Adam& op, int64_t tile) {
    // Column 4 * lane + i lies at word 32 * i + lane, 9 words apart, so that a warp writes to 32
    // banks.
    __shared__ uint32_t transposed_words[kTileColumns * (kWarps + 1)];
    const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
    const int64_t row = tile * kTileRows + 4 * warp;
    const int64_t valid = op.valid, rows = op.rows, columns = op.columns;
    const float *weights = op.weight, *gradients = op.gradient, *ms = op.first, *vs = op.second;
    const float* limits = op.rounded.clip;
    float* new_clip = op.new_clip;
    float *updated = op.new_weight, *new_ms = op.new_first, *new_vs = op.new_second,
          *scales = op.rounded.scale;
    int8_t *out = op.rounded.codes, *transposed = op.rounded.transposed;
    const float largest = op.rounded.largest;
    const Step step(op);
    float scale[4];
    bool missing[4] = {};
    if (new_clip) {
        Magnitude most[4] = {};
        for (int64_t column = 4 * lane; column < columns; column += kTileColumns) {
#pragma unroll
            for (int r = 0; r < 4; ++r) {
                if (row + r >= valid) continue;
                const int64_t element = (row + r) * columns + column;
                Moments value{load_words<float4>(weights + element),
                              load_gradient(gradients + element), load_words<float4>(ms + element),
                              load_words<float4>(vs + element)};
                value.apply(step);
                store_words(updated + element, value.weight);
                store_words(new_ms + element, value.m);
                store_words(new_vs + element, value.v);
                const float4& w = value.weight;
                most[r] = Largest::join(
                    most[r], Largest::join(Largest::join(magnitude_of(w.x), magnitude_of(w.y)),
                                           Largest::join(magnitude_of(w.z), magnitude_of(w.w))));
            }
        }
#pragma unroll
        for (int r = 0; r < 4; ++r) {
            const Magnitude of_row = warp_reduce<Largest>(most[r]);
            const float limit = row + r < valid ? clip_of(of_row, limits[row + r]) : largest;
            scale[r] = limit / largest;
            __syncwarp();
            if (lane == 0 && row + r < valid) new_clip[row + r] = limit;
        }
    } else {
#pragma unroll
        for (int r = 0; r < 4; ++r)
            scale[r] = row + r < valid ? limits[op.clips > 1 ? row + r : 0] / largest : 1.0f;
    }
    for (int64_t start = 0; start < columns; start += kTileColumns) {
        const int64_t column = start + 4 * lane;
        uint32_t word[4] = {};  // the codes of each row, then of each column
#pragma unroll
        for (int first = 0; first < 4; first += kAtOnce) {
            Moments values[kAtOnce];
#pragma unroll
            for (int r = first; r < first + kAtOnce; ++r) {
                if (row + r >= valid || column >= columns) continue;
                const int64_t element = (row + r) * columns + column;
                if (new_clip) {
                    values[r - first].weight = load_words<float4>(updated + element);
                } else {
                    values[r - first] = {
                        load_words<float4>(weights + element), load_gradient(gradients + element),
                        load_words<float4>(ms + element), load_words<float4>(vs + element)};
                }
            }
#pragma unroll
            for (int r = first; r < first + kAtOnce; ++r) {
                if (row + r >= rows || column >= columns) continue;
                const int64_t element = (row + r) * columns + column;
                if (row + r < valid) {
                    Moments& value = values[r - first];
                    if (!new_clip) {
                        value.apply(step);
                        store_words(updated + element, value.weight);
                        store_words(new_ms + element, value.m);
                        store_words(new_vs + element, value.v);
                    }
                    missing[r] |= any_nan(value.weight);
                    word[r] = codes_of(value.weight, scale[r], largest);
                }
                store_words(out + element, word[r]);
            }
        }
        if (!transposed) continue;
        transpose_bytes(word);
        __syncthreads();  // the tile before has been read
#pragma unroll
        for (int i = 0; i < 4; ++i)
            transposed_words[(kWarp * i + lane) * (kWarps + 1) + warp] = word[i];
        __syncthreads();
        const int line = threadIdx.x / 2, half = threadIdx.x % 2;
        const int64_t out_row = start + 4 * (line % kWarp) + line / kWarp;
        const int64_t out_column = tile * kTileRows + 16 * half;
        if (out_row < columns && out_column < rows) {
            const uint32_t* from = transposed_words + line * (kWarps + 1) + 4 * half;
            store_words(transposed + (out_row * rows + out_column),
                        make_uint4(from[0], from[1], from[2], from[3]));
        }
    }
#pragma unroll
    for (int r = 0; r < 4; ++r) {
        const bool any = __any_sync(kAllLanes, missing[r]);
        if (lane == 0 && row + r < rows) scales[row + r] = poisoned(scale[r], any);
    }
}

// Under a shared clip, a NaN in one row poisons all scales.
LSQ_INLINE void poison(const Adam& op) {
    float* scales = op.rounded.scale;
    const int64_t valid = op.valid;
    bool missing = false;
    for (int64_t row = threadIdx.x; row < valid; row += kThreads)
        missing |= scales[row] != scales[row];
    if (!block_any<kThreads>(missing)) return;
    for (int64_t row = threadIdx.x; row < valid; row += kThreads) scales[row] = not_a_number();
}

// The step and the tile of this block, by the tables.
LSQ_INLINE Adam step_of(const Adam* table, const int32_t* tiles) {
    return table[tiles[2 * blockIdx.x]];
}
LSQ_INLINE int64_t tile_of(const int32_t* tiles) { return tiles[2 * blockIdx.x + 1]; }

}  // namespace

// Kernels for the step of one tensor, and for those of many.
LSQ_KERNEL __launch_bounds__(kThreads, 3) lsq_adam(const Adam op) {
    wait_for_launches();
    update(op, blockIdx.x);
}
LSQ_EXPORT(lsq_adam)
LSQ_KERNEL __launch_bounds__(kThreads, 3) lsq_adam_table(In<Adam> table, In<int32_t> tiles) {
    wait_for_launches();
    update(step_of(table, tiles), tile_of(tiles));
}
LSQ_EXPORT(lsq_adam_table)

LSQ_KERNEL __launch_bounds__(kThreads, 2) lsq_adam_codes(const Adam op) {
    wait_for_launches();
    update_rows(op, blockIdx.x);
}
LSQ_EXPORT(lsq_adam_codes)
LSQ_KERNEL __launch_bounds__(kThreads, 2) lsq_adam_codes_table(In<Adam> table, In<int32_t> tiles) {
    wait_for_launches();
    update_rows(step_of(table, tiles), tile_of(tiles));
}
LSQ_EXPORT(lsq_adam_codes_table)

LSQ_KERNEL __launch_bounds__(kThreads) lsq_adam_poison(const Adam op) {
    wait_for_launches();
    poison(op);
}
LSQ_EXPORT(lsq_adam_poison)
LSQ_KERNEL __launch_bounds__(kThreads) lsq_adam_poison_table(In<Adam> table, In<int32_t> tiles) {
    wait_for_launches();
    poison(step_of(table, tiles));
}
LSQ_EXPORT(lsq_adam_poison_table)

// norm [1] of all gradients. The last block adds up the blocks' sums of squares, partial float32
// [gridDim.x], in order in double precision.
LSQ_KERNEL __launch_bounds__(kThreads)
    lsq_gradient_norm(In<Adam> table, In<int32_t> tiles, Out<uint32_t> ticket, Out<float> partial,
                      Out<float> norm) {
    wait_for_launches();
    const Adam& op = step_of(table, tiles);
    const float* gradient = op.gradient;
    const int64_t begin = tile_of(tiles) * kNormRun, end = min(begin + kNormRun, op.numel);
    float sum = 0.0f;
    for (int64_t i = begin + 4 * threadIdx.x; i < end; i += 4 * kThreads) {
        float4 g = {0.0f, 0.0f, 0.0f, 0.0f};
        if (i + 4 <= end) {
            g = load_gradient(gradient + i);
        } else {
            g.x = gradient[i];
            if (i + 1 < end) g.y = gradient[i + 1];
            if (i + 2 < end) g.z = gradient[i + 2];
        }
        sum += (g.x * g.x + g.y * g.y) + (g.z * g.z + g.w * g.w);
    }
    sum = group_reduce<Sum, kThreads, kThreads>(sum);
    float* sums = partial;
    if (threadIdx.x == 0) sums[blockIdx.x] = sum;
    bool nothing = false;
    if (!last_block<kThreads>(ticket, nothing)) return;
    double total = 0.0;
    for (int64_t i = threadIdx.x; i < gridDim.x; i += kThreads) total += sums[i];
    total = block_total<kThreads>(total);
    if (threadIdx.x == 0) norm[0] = static_cast<float>(sqrt(total));
}
LSQ_EXPORT(lsq_gradient_norm)
