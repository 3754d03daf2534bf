// Rounds a weight parameter [inputs, outputs] to codes [outputs, inputs] under one clip for each
// output, or one for all. K inputs, N outputs, P rows of codes, all multiples of 16.
//
// A block takes a tile of 128 x 128 values through shared memory. Scales are written first; a NaN
// then poisons that of its output, or all under a single clip. lsq/ops/rounding.py is the
// reference.
#include "reduce.cuh"
#include "transpose.cuh"

// clip [N] or [1] -> scale [P], 1 from N on. A thread for each, which makes a new clip first if
// wanted.
LSQ_KERNEL __launch_bounds__(kTileThreads) lsq_begin_weight_in_out(const RoundWeight op) {
    wait_for_launches();
    const int64_t output = thread_of_grid<kTileThreads>();
    if (output >= op.rows) return;
    float *scale = op.weight.scale, *new_clip = op.new_clip;
    const float *clip = op.weight.clip, *values = op.weight.values;
    float limit = output < op.valid ? clip[op.clips > 1 ? output : 0] : op.weight.largest;
    if (new_clip && output < op.valid) {
        Magnitude largest = 0;
#pragma unroll 8
        for (int64_t input = 0; input < op.columns; ++input) {
            largest = Largest::join(largest, magnitude_of(values[input * op.valid + output]));
        }
        new_clip[output] = limit = clip_of(largest, limit);
    }
    scale[output] = limit / op.weight.largest;
}
LSQ_EXPORT(lsq_begin_weight_in_out)

// values [K, N] -> codes [P, K], and [K, P] if wanted.
LSQ_KERNEL __launch_bounds__(kTileThreads) lsq_round_weight_in_out(const RoundWeight op) {
    wait_for_launches();
    const TilePosition tile{blockIdx.x, blockIdx.y};
    const int64_t input = tile.row(), output = tile.column(), inputs = op.columns,
                  outputs = op.valid;
    const float *values = op.weight.values, *old_clip = op.weight.clip, *new_clip = op.new_clip,
                q = op.weight.largest;
    const float* clip = new_clip ? new_clip : old_clip;
    float* scale = op.weight.scale;
    uint32_t word[kGroupColumns] = {}, missing = 0;  // a word of four inputs for each output; a bit
    if (output < outputs) {
#pragma unroll
        for (int half = 0; half < kGroupColumns; half += kVector) {
            float step[kVector];
#pragma unroll
            for (int i = 0; i < kVector; ++i)
                step[i] = clip[op.clips > 1 ? output + half + i : 0] / q;
#pragma unroll
            for (int r = 0; r < kGroupRows; ++r) {
                if (input + r >= inputs) continue;
                float x[kVector];
                load8(values + ((input + r) * outputs + output + half), x);
#pragma unroll
                for (int i = 0; i < kVector; ++i) {
                    const float ratio = x[i] / step[i];
                    missing |= static_cast<uint32_t>(ratio != ratio) << (half + i);
                    word[half + i] |= static_cast<uint32_t>(static_cast<uint8_t>(code_of(ratio, q)))
                                      << (8 * r);
                }
            }
        }
    }
    if (missing && op.clips > 1) {
#pragma unroll
        for (int i = 0; i < kGroupColumns; ++i) {
            if (missing >> i & 1) scale[output + i] = not_a_number();
        }
    } else if (missing) {
        for (int64_t i = 0; i < outputs; ++i) scale[i] = not_a_number();
    }
    int8_t* transposed = op.weight.transposed;
    if (transposed && output < op.rows) {
#pragma unroll
        for (int r = 0; r < kGroupRows; ++r) {
            if (input + r >= inputs) continue;
            uint32_t four[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const uint32_t* from = word + 4 * i;
                four[i] = low_bytes(from[0] >> 8 * r, from[1] >> 8 * r, from[2] >> 8 * r,
                                    from[3] >> 8 * r);
            }
            store_words(transposed + ((input + r) * op.rows + output),
                        make_uint4(four[0], four[1], four[2], four[3]));
        }
    }
    store_transposed(tile, word, op.weight.codes, op.rows, inputs);
}
LSQ_EXPORT(lsq_round_weight_in_out)
