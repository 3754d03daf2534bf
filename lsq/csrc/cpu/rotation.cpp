// Rotary embeddings of queries and keys, norms of their heads before, and rounding;
// lsq/ops/rotation.py is the reference.
#include "loops.h"

using namespace lsq;

namespace {

// Rotates the heads of row `row` in place, forward or with `direction` -1 back.
void rotate(const Rotation& rotation, int64_t row, float direction, float* x) {
    const int64_t half = rotation.rotated / 2;
    const float *cosine = rotation.table + rotation.positions[row] * rotation.rotated,
                *sine = cosine + half;
    for (int64_t head = 0; head < rotation.heads; ++head) {
        float *low = x + head * rotation.width, *high = low + half;
#pragma omp simd
        for (int64_t i = 0; i < half; ++i) {
            const float a = low[i], b = high[i], s = direction * sine[i];
            low[i] = a * cosine[i] - b * s;
            high[i] = b * cosine[i] + a * s;
        }
    }
}

const float* weight_of(const Rotation& rotation, const HeadNorms& norms, int64_t head) {
    return head < rotation.queries ? norms.query : norms.key;
}

// Norms of the heads of row `row`, in place.
void normalise(const Rotation& rotation, const HeadNorms& norms, int64_t row, float* x) {
    const int64_t n = rotation.width;
    for (int64_t head = 0; head < rotation.heads; ++head, x += n) {
        const float* weight = weight_of(rotation, norms, head);
        float squares = 0.0f;
#pragma omp simd reduction(+ : squares)
        for (int64_t i = 0; i < n; ++i) squares += x[i] * x[i];
        const float rstd = 1.0f / std::sqrt(squares / static_cast<float>(n) + norms.epsilon);
#pragma omp simd
        for (int64_t i = 0; i < n; ++i) x[i] = x[i] * rstd * weight[i];
        norms.rstd[row * rotation.heads + head] = rstd;
    }
}

// Gradients of the norms' weights and of their input.
class NormsGradient {
public:
    NormsGradient(const RotateGradient& op, const Blocks& blocks)
        : op_(op), rotation_(op.rotation), query_(blocks.count, rotation_.width, op.x),
          key_(blocks.count, rotation_.width, op.x) {}

    // g: gradient of the normed heads of row `row` -> of the heads; scratch: D numbers.
    void run(int64_t block, int64_t row, float* g, float* scratch) {
        const int64_t n = rotation_.width;
        const float* x = op_.x + row * op_.columns;
        for (int64_t head = 0; head < rotation_.heads; ++head, x += n, g += n) {
            const float* weight = weight_of(rotation_, op_.norms, head);
            const float rstd = op_.norms.rstd[row * rotation_.heads + head];
            float along = 0.0f;
#pragma omp simd reduction(+ : along)
            for (int64_t i = 0; i < n; ++i) {
                scratch[i] = x[i] * rstd;
                along += g[i] * weight[i] * scratch[i];
            }
            (head < rotation_.queries ? query_ : key_).add_product(block, g, scratch);
            const float projection = along / static_cast<float>(n);
#pragma omp simd
            for (int64_t i = 0; i < n; ++i)
                g[i] = rstd * (g[i] * weight[i] - scratch[i] * projection);
        }
    }

    void finish() const {
        query_.write(op_.dquery);
        key_.write(op_.dkey);
    }

private:
    const RotateGradient& op_;
    const Rotation& rotation_;
    ColumnSums query_, key_;
};

}  // namespace

LSQ_OPERATION(Rotate, op) {
    const int64_t n = op.columns;
    const Magnitude largest = for_rows(op.rows, n, [&](int64_t row, Scratch& scratch) -> Magnitude {
        float* x = op.out ? op.out + row * n : scratch.a.data();
        std::memcpy(x, op.x + row * n, n * sizeof(float));
        if (op.norms.query) normalise(op.rotation, op.norms, row, x);
        rotate(op.rotation, row, 1.0f, x);
        return op.rounded.codes ? round_row(op.rounded, row * n, n, x, scratch.flags.data()) : 0;
    });
    finish(op.rounded, largest);
}

LSQ_OPERATION(RotateGradient, op) {
    const int64_t n = op.columns;
    const Blocks blocks(op.rows);
    GradientSink sink(blocks, n, op.dx.floats, op.dx.rounded, op.dx.sum);
    NormsGradient norms(op, blocks);
    for_blocks(blocks, n, [&](int64_t block, int64_t row, Scratch& scratch) {
        float* g = scratch.a.data();
        std::memcpy(g, op.gradient + row * n, n * sizeof(float));
        rotate(op.rotation, row, -1.0f, g);
        if (op.x) norms.run(block, row, g, scratch.b.data());
        sink.add(block, row, g, g);
    });
    if (op.x) norms.finish();
    sink.finish();
}
