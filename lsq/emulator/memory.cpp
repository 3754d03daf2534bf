// libcuda's functions of memory, and those by which other owners of memory say when it begins and
// ends. Allocations are host memory that is never returned, and hold NaN.
#include <cstdlib>
#include <cstring>
#include <map>
#include <vector>

#include "streams.h"

using namespace emulator;

namespace {

constexpr size_t ALIGNMENT = 256;
const void* const HOST_HANDLE = reinterpret_cast<const void*>(-1);  // the host in place of a stream

std::map<void*, size_t> allocated;
std::multimap<size_t, void*> given_back;

void* allocate(size_t bytes, Lane& lane) {
    if (!bytes) fail(INVALID_VALUE, "0 bytes of memory");
    const size_t size = (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    const auto known = given_back.find(size);
    void* address = known != given_back.end() ? known->second : std::aligned_alloc(ALIGNMENT, size);
    if (known != given_back.end()) given_back.erase(known);
    if (!address) fail(OUT_OF_MEMORY, std::to_string(bytes) + " bytes of memory");
    std::memset(address, 0xff, size);
    allocated[address] = size;
    begin_memory(lane, "of " + std::to_string(bytes) + " bytes", address, bytes);
    return address;
}

void release(void* address, Lane& lane) {
    const auto found = allocated.find(address);
    if (found == allocated.end()) fail(INVALID_VALUE, "no memory was allocated there");
    const std::string fault = end_memory(lane, {}, address);
    given_back.emplace(found->second, address);
    allocated.erase(found);
    if (!fault.empty()) fail(INVALID_VALUE, fault);
}

void refuse_allocation(Stream& stream) {
    refuse_in_capture(stream, NOT_SUPPORTED, "the emulator captures no allocation");
}

Lane& find_lane(const void* handle) {
    if (handle == HOST_HANDLE) return host();
    Stream& stream = find_stream(handle);
    order_behind_others(stream);
    return stream.lane;
}

}  // namespace

DRIVER cuMemAlloc_v2(void** address, size_t bytes) {
    return guarded([&] {
        Stream& stream = find_stream(nullptr);
        refuse_unsafe("cuMemAlloc");
        *address = allocate(bytes, stream.lane);
    });
}

// Waits for the device.
DRIVER cuMemFree_v2(void* address) {
    return guarded([&] {
        Stream& stream = find_stream(nullptr);
        refuse_unsafe("cuMemFree");
        synchronize(stream.context);
        release(address, stream.lane);
    });
}

DRIVER cuMemAllocAsync(void** address, size_t bytes, const void* handle) {
    return guarded([&] {
        Stream& stream = find_stream(handle);
        refuse_allocation(stream);
        *address = allocate(bytes, stream.lane);
    });
}

DRIVER cuMemFreeAsync(void* address, const void* handle) {
    return guarded([&] {
        Stream& stream = find_stream(handle);
        refuse_allocation(stream);
        release(address, stream.lane);
    });
}

DRIVER cuMemcpyAsync(void* to, const void* from, size_t bytes, const void* handle) {
    return guarded([&] {
        submit(find_stream(handle), "a copy", [to, from, bytes] {
            std::string fault = use(from, bytes, false);
            if (fault.empty()) fault = use(to, bytes, true);
            if (fault.empty()) std::memmove(to, from, bytes);
            return fault.empty() ? "" : "a copy " + fault;
        });
    });
}

DRIVER cuMemsetD8Async(void* to, unsigned char value, size_t bytes, const void* handle) {
    return guarded([&] {
        submit(find_stream(handle), "a fill", [to, value, bytes] {
            const std::string fault = use(to, bytes, true);
            if (fault.empty()) std::memset(to, value, bytes);
            return fault.empty() ? "" : "a fill " + fault;
        });
    });
}

const char* emulator_use(const void* address, size_t bytes, int writes) {
    thread_local std::string fault;
    fault = use(address, bytes, writes);
    return fault.empty() ? nullptr : fault.c_str();
}

// Begins or ends to watch for unordered uses of memory; forgets earlier uses.
DRIVER lsq_emulator_watch(int on) {
    return guarded([&] {
        if (!watch(on)) fail(NOT_SUPPORTED, "nothing is watched under the sanitizers");
    });
}

// Code other than kernels uses memory, on a stream or the host, which does not wait.
DRIVER lsq_emulator_use(const void* handle, const char* what, const void* address, size_t bytes,
                        int writes) {
    return guarded([&] {
        const auto work = [name = std::string(what), address, bytes, writes] {
            const std::string fault = use(address, bytes, writes);
            return fault.empty() ? "" : name + " " + fault;
        };
        if (handle == HOST_HANDLE) return perform(host(), what, work);
        submit(find_stream(handle), what, work);
    });
}

// Memory of other allocators begins in the order of a stream, or of the host, whose memory all
// devices use.
DRIVER lsq_emulator_memory_begin(const void* handle, const char* name, const void* address,
                                 size_t bytes) {
    return guarded([&] { begin_memory(find_lane(handle), name, address, bytes); });
}

// It ends in the order of a stream or the host, and of `count` streams that its allocator waits for
// (record_stream).
DRIVER lsq_emulator_memory_end(const void* handle, const void* address, const void* const* others,
                               size_t count) {
    return guarded([&] {
        std::vector<Lane*> lanes;
        for (size_t i = 0; i < count; ++i) lanes.push_back(&find_lane(others[i]));
        const std::string fault = end_memory(find_lane(handle), lanes, address);
        if (!fault.empty()) fail(INVALID_VALUE, fault);
    });
}
