// Makes the scales of a pass from its clips; lsq/ops/sums.py is the reference.
#include "device.cuh"

LSQ_KERNEL lsq_start_scales(const __grid_constant__ StartScales op) {
    wait_for_launches();
    if (threadIdx.x >= sizeof op.scales / sizeof *op.scales) return;
    const StartedScale& entry = op.scales[threadIdx.x];
    if (entry.scale) entry.scale[0] = entry.clip[0] / entry.largest;
}
LSQ_EXPORT(lsq_start_scales)
