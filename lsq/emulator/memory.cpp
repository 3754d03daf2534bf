// The functions of libcuda about memory, and those by which other owners of memory say when it begins and ends. What is
// allocated here is host memory, which never goes back to the host, and holds NaN.
#include <cstdlib>
#include <cstring>
#include <map>
#include <vector>

#include "captures.h"
#include "results.h"
#include "work.h"

namespace {

constexpr size_t ALIGNMENT = 256;
const void* const HOST_HANDLE = reinterpret_cast<const void*>(-1);  // stands for the host in place of a stream

std::map<void*, size_t> allocated;
std::multimap<size_t, void*> given_back;

int allocate(void** address, size_t bytes, emulator::Lane& lane) {
    if (!bytes) return emulator::fail(emulator::INVALID_VALUE, "0 bytes of memory");
    const size_t size = (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    const auto known = given_back.find(size);
    if (known != given_back.end()) {
        *address = known->second;
        given_back.erase(known);
    } else {
        *address = std::aligned_alloc(ALIGNMENT, size);
    }
    if (!*address) return emulator::fail(emulator::OUT_OF_MEMORY, std::to_string(bytes) + " bytes of memory");
    std::memset(*address, 0xff, size);
    allocated[*address] = size;
    emulator::begin_memory(lane, "of " + std::to_string(bytes) + " bytes", *address, bytes);
    return emulator::SUCCESS;
}

int release(void* address, emulator::Lane& lane) {
    const auto found = allocated.find(address);
    if (found == allocated.end()) return emulator::fail(emulator::INVALID_VALUE, "no memory was allocated there");
    const std::string fault = emulator::end_memory(lane, {}, address);
    given_back.emplace(found->second, address);
    allocated.erase(found);
    return fault.empty() ? emulator::SUCCESS : emulator::fail(emulator::INVALID_VALUE, fault);
}

bool is_host(const void* handle) { return handle == HOST_HANDLE; }

// Of a stream, or of the host.
int find_lane(const void* handle, emulator::Lane*& lane) {
    if (is_host(handle)) {
        lane = &emulator::host();
        return emulator::SUCCESS;
    }
    emulator::Stream* stream;
    if (const int refused = emulator::find_stream(handle, stream)) return refused;
    emulator::order_behind_others(*stream);
    lane = &stream->lane;
    return emulator::SUCCESS;
}

struct Copy {
    void* to;
    const void* from;
    size_t bytes;
};

std::string copy(const Copy& job) {
    std::string fault = emulator::use(job.from, job.bytes, false);
    if (fault.empty()) fault = emulator::use(job.to, job.bytes, true);
    if (fault.empty()) std::memmove(job.to, job.from, job.bytes);
    return fault.empty() ? "" : "a copy " + fault;
}

}  // namespace

using namespace emulator;

// Waits for the device when it is given back.
DRIVER cuMemAlloc_v2(void** address, size_t bytes) {
    HOLD_DRIVER;
    Stream* stream;
    if (const int refused = find_stream(nullptr, stream)) return refused;
    if (const int refused = refuse_unsafe("cuMemAlloc")) return refused;
    return allocate(address, bytes, stream->lane);
}

DRIVER cuMemFree_v2(void* address) {
    HOLD_DRIVER;
    Stream* stream;
    if (const int refused = find_stream(nullptr, stream)) return refused;
    if (const int refused = refuse_unsafe("cuMemFree")) return refused;
    if (const int refused = synchronize(stream->context)) return refused;
    return release(address, stream->lane);
}

DRIVER cuMemAllocAsync(void** address, size_t bytes, const void* handle) {
    HOLD_DRIVER;
    Stream* stream;
    if (const int refused = find_stream(handle, stream)) return refused;
    if (stream->capture) return invalidate(*stream->capture, NOT_SUPPORTED, "the emulator captures no allocation");
    return allocate(address, bytes, stream->lane);
}

DRIVER cuMemFreeAsync(void* address, const void* handle) {
    HOLD_DRIVER;
    Stream* stream;
    if (const int refused = find_stream(handle, stream)) return refused;
    if (stream->capture) return invalidate(*stream->capture, NOT_SUPPORTED, "the emulator captures no allocation");
    return release(address, stream->lane);
}

DRIVER cuMemcpyAsync(void* to, const void* from, size_t bytes, const void* handle) {
    HOLD_DRIVER;
    Stream* stream;
    if (const int refused = find_stream(handle, stream)) return refused;
    return submit(*stream, "a copy", [job = Copy{to, from, bytes}] { return copy(job); });
}

DRIVER cuMemsetD8Async(void* to, unsigned char value, size_t bytes, const void* handle) {
    HOLD_DRIVER;
    Stream* stream;
    if (const int refused = find_stream(handle, stream)) return refused;
    return submit(*stream, "a fill", [to, value, bytes] {
        const std::string fault = use(to, bytes, true);
        if (fault.empty()) std::memset(to, value, bytes);
        return fault.empty() ? "" : "a fill " + fault;
    });
}

const char* emulator_use(const void* address, size_t bytes, int writes) {
    thread_local std::string fault;
    fault = use(address, bytes, writes);
    return fault.empty() ? nullptr : fault.c_str();
}

// Finds uses of memory that nothing orders, or no longer; what has happened so far is forgotten.
DRIVER lsq_emulator_watch(int on) {
    HOLD_DRIVER;
    return watch(on) ? SUCCESS : fail(NOT_SUPPORTED, "nothing is watched under the sanitizers");
}

// Somebody else than a kernel touches memory: on a stream, or the host, which waits for nothing by that.
DRIVER lsq_emulator_use(const void* handle, const char* what, const void* address, size_t bytes, int writes) {
    HOLD_DRIVER;
    const auto work = [name = std::string(what), address, bytes, writes] {
        const std::string fault = use(address, bytes, writes);
        return fault.empty() ? "" : name + " " + fault;
    };
    if (is_host(handle)) return perform(host(), what, work);
    Stream* stream;
    if (const int refused = find_stream(handle, stream)) return refused;
    return submit(*stream, what, work);
}

// Memory that others allocate begins to be used in the order of a stream, or the host's memory, which all devices use.
DRIVER lsq_emulator_memory_begin(const void* handle, const char* name, const void* address, size_t bytes) {
    HOLD_DRIVER;
    Lane* lane;
    if (const int refused = find_lane(handle, lane)) return refused;
    begin_memory(*lane, name, address, bytes);
    return SUCCESS;
}

// It ends in the order of a stream or the host, and of `count` streams that its allocator waits for as well (record_stream).
DRIVER lsq_emulator_memory_end(const void* handle, const void* address, const void* const* others, size_t count) {
    HOLD_DRIVER;
    Lane* lane;
    std::vector<Lane*> lanes;
    for (size_t i = 0; i < count; ++i) {
        if (const int refused = find_lane(others[i], lane)) return refused;
        lanes.push_back(lane);
    }
    if (const int refused = find_lane(handle, lane)) return refused;
    const std::string fault = end_memory(*lane, lanes, address);
    return fault.empty() ? SUCCESS : fail(INVALID_VALUE, fault);
}
