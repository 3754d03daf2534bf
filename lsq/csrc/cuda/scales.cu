// The scales of a pass from its clips; lsq/ops/scales.py is the reference.
#include "device.cuh"

namespace {

constexpr int kTogether = 16;

}  // namespace

LSQ_KERNEL lsq_start_scales(const __grid_constant__ StartScales op) {
    if (threadIdx.x >= kTogether) return;
    const StartedScale& one = (&op.scale0)[threadIdx.x];
    if (one.scale) one.scale[0] = one.clip[0] / one.largest;
}
LSQ_EXPORT(lsq_start_scales)
