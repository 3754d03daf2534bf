// Writes what changes from call to call into slots of device memory: addresses of inputs, a random key, numbers.
//
// The values travel as arguments of the launch, so the host need not wait and nothing can change them under way.
#include "device.cuh"

// v0 .. v7 -> slots[first .. first + count - 1].
LSQ_KERNEL __launch_bounds__(32) lsq_store_slots(
    Out<int64_t> slots, int64_t first, int64_t count, int64_t v0, int64_t v1, int64_t v2, int64_t v3, int64_t v4,
    int64_t v5, int64_t v6, int64_t v7) {
    if (threadIdx.x) return;
    const int64_t values[8] = {v0, v1, v2, v3, v4, v5, v6, v7};
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        if (i < count) slots[first + i] = values[i];
    }
}
LSQ_EXPORT(lsq_store_slots)
