// The test device: PyTorch's PrivateUse1 in memory of the host. What its parts share.
#pragma once

#include <ATen/core/Generator.h>
#include <c10/core/Allocator.h>
#include <c10/core/Device.h>
#include <c10/core/Stream.h>

namespace standin {

constexpr c10::DeviceIndex kDevices = 2;
constexpr auto kType = c10::DeviceType::PrivateUse1;

// What a watcher is told of.
enum What : int64_t { kLaunch = 0, kWait = 1, kFault = 2 };

// Tells the watcher, if there is one, of an operation that the device runs, of what the host waits
// for, or of memory that ended while somebody used it.
void tell(What what, const std::string& name);

c10::Device current_device();
c10::Stream current_stream(c10::Device device);
void record_stream(const void* memory, c10::Stream stream);
c10::Allocator* allocator();
bool is_pinned(const void* address);
at::Generator default_generator(c10::DeviceIndex index);

}  // namespace standin
