// The emulated driver, on whose streams the test device works: it knows what streams and events
// order.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <string>
#include <vector>

namespace standin {

void open_driver(const char* path);

// Handles of streams are their numbers; 0 is the first stream of a device.
c10::StreamId new_stream(c10::Device device);
void record_event(void** event, c10::Stream stream);
void wait_event(void* event, c10::Stream stream);
void destroy_event(void* event, c10::Device device);
void synchronize_event(void* event, c10::Device device);
void synchronize_stream(c10::Stream stream);
void synchronize_device(c10::Device device);

// An operation of PyTorch touches memory on the current stream.
void use(c10::Device device, const std::string& what, const void* address, size_t bytes,
         bool writes);

// Begins or ends to look at the order of what touches memory; returns how often that was said.
int64_t order(bool on);

// Memory begins and ends in the order of a stream; it ends behind the work of `others`, too. What
// is wrong with that.
void begin_memory(c10::Stream stream, const void* address, size_t bytes);
std::string end_memory(c10::Stream stream, const void* address,
                       const std::vector<c10::StreamId>& others);

}  // namespace standin
