// Stores its arguments: a kernel that does next to nothing, for tests of the launcher.
#include "device.cuh"

// v0 .. v7 -> out[first .. first + count - 1].
LSQ_KERNEL __launch_bounds__(32)
    store_values(Out<int64_t> out, int64_t first, int64_t count, int64_t v0, int64_t v1, int64_t v2,
                 int64_t v3, int64_t v4, int64_t v5, int64_t v6, int64_t v7) {
    wait_for_launches();
    if (threadIdx.x) return;
    const int64_t values[8] = {v0, v1, v2, v3, v4, v5, v6, v7};
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        if (i < count) out[first + i] = values[i];
    }
}
LSQ_EXPORT(store_values)
