// The contexts of the emulated devices: which one is current in a thread.
#pragma once

#include <memory>
#include <string>

namespace emulator {

struct Stream;

// What the driver calls a CUcontext: the primary context of a device.
struct Context {
    int device;
    std::shared_ptr<Stream> null_stream;  // made when it is first wanted
};

// The one that is current in this thread; null where there is none, as in every thread that has just begun.
Context* current_context();

// The same, or a failure of the driver.
int find_context(Context*& context);

// "" for the first device, " of device 1" for others.
std::string of_device(int device);

}  // namespace emulator
