// The contexts of the emulated devices: which one is current in a thread.
#pragma once

namespace emulator {

// What the driver calls a CUcontext: the primary context of a device.
struct Context {
    int device;
};

// The one that is current in this thread; null where there is none, as in every thread that has just begun.
Context* current_context();

}  // namespace emulator
