// Memory, streams, events and random numbers of the test device. Work is done at once, on the host,
// in the thread that asks for it; what streams and events order is told to the emulated driver, and
// whoever waits for one is counted.
#include "runtime.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/core/GeneratorForPrivateuseone.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <array>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>

#include "driver.h"

namespace standin {

namespace {

using Watcher = void (*)(int64_t what, const char* name, int64_t stream);

constexpr size_t kAlignment = 256;  // as on CUDA
constexpr int kRubbish = 0xFF;      // NaN as a float, -1 as an integer

std::atomic<Watcher> watcher{nullptr};
std::atomic<int64_t> ordering{0};  // which look at the order of work goes on; 0: none
thread_local c10::DeviceIndex device_now = 0;
thread_local std::array<c10::StreamId, kDevices> streams_now{};

// Memory that was handed out: its bytes, the stream that it belongs to, and others that use it.
struct Piece {
    size_t bytes;
    c10::Stream stream;
    int64_t epoch;  // of the looks at the order of work
    std::vector<c10::StreamId> others = {};
};

// Memory that was handed out and not given back, by address.
class Registry {
  public:
    void* take(size_t bytes, c10::Stream stream, int64_t epoch) {
        void* found = nullptr;
        const size_t rounded = (bytes + kAlignment - 1) / kAlignment * kAlignment;
        TORCH_CHECK(!posix_memalign(&found, kAlignment, rounded),
                    "the test device is out of memory");
        std::memset(found, kRubbish, rounded);
        const std::lock_guard<std::mutex> guard(mutex_);
        pieces_.emplace(found, Piece{rounded, stream, epoch});
        return found;
    }

    Piece give_back(void* address) {
        const std::lock_guard<std::mutex> guard(mutex_);
        const Piece piece = pieces_.extract(address).mapped();
        std::memset(address, kRubbish, piece.bytes);
        return piece;
    }

    void record(const void* address, c10::StreamId stream) {
        const std::lock_guard<std::mutex> guard(mutex_);
        const auto piece = pieces_.find(const_cast<void*>(address));
        if (piece != pieces_.end() && piece->second.stream.id() != stream)
            piece->second.others.push_back(stream);
    }

    bool holds(const void* address) {
        const std::lock_guard<std::mutex> guard(mutex_);
        auto next = pieces_.upper_bound(const_cast<void*>(address));
        if (next == pieces_.begin()) return false;
        const auto& [first, piece] = *--next;
        return address < static_cast<char*>(first) + piece.bytes;
    }

  private:
    std::mutex mutex_;
    std::map<void*, Piece> pieces_;
};

// They outlive whatever is freed while the process ends.
Registry& device_memory() {
    static Registry* registry = new Registry;
    return *registry;
}

Registry& pinned_memory() {
    static Registry* registry = new Registry;
    return *registry;
}

void free_device(void* address) {
    const Piece piece = device_memory().give_back(address);
    if (piece.epoch && piece.epoch == ordering) {
        const std::string fault = end_memory(piece.stream, address, piece.others);
        if (!fault.empty()) tell(kFault, fault);
    }
    std::free(address);
}

void free_pinned(void* address) {
    pinned_memory().give_back(address);
    std::free(address);
}

c10::Device with_index(c10::Device device) {
    return {kType, device.has_index() ? device.index() : device_now};
}

c10::Stream stream_of(c10::Device device, c10::StreamId id) {
    return c10::Stream(c10::Stream::UNSAFE, with_index(device), id);
}

struct DeviceAllocator final : c10::Allocator {
    c10::DataPtr allocate(size_t bytes) override {
        const c10::Stream stream = current_stream(current_device());
        void* found = bytes ? device_memory().take(bytes, stream, ordering) : nullptr;
        if (bytes && ordering) begin_memory(stream, found, bytes);
        return {found, found, &free_device, current_device()};
    }
    c10::DeleterFnPtr raw_deleter() const override { return &free_device; }
    void copy_data(void* to, const void* from, size_t bytes) const override {
        std::memcpy(to, from, bytes);
    }
};

struct PinnedAllocator final : at::HostAllocator {
    c10::DataPtr allocate(size_t bytes) override {
        void* found =
            bytes ? pinned_memory().take(bytes, current_stream(current_device()), 0) : nullptr;
        return {found, found, &free_pinned, c10::Device(c10::DeviceType::CPU)};
    }
    c10::DeleterFnPtr raw_deleter() const override { return &free_pinned; }
    void copy_data(void* to, const void* from, size_t bytes) const override {
        std::memcpy(to, from, bytes);
    }
    bool record_event(void*, void*, c10::Stream) override { return true; }
    void empty_cache() override {}
    at::HostStats get_stats() override { return {}; }
    void reset_accumulated_stats() override {}
    void reset_peak_stats() override {}
};

DeviceAllocator device_allocator;
PinnedAllocator pinned_allocator;
REGISTER_ALLOCATOR(kType, &device_allocator);
REGISTER_HOST_ALLOCATOR(kType, &pinned_allocator);

struct Guard final : c10::impl::DeviceGuardImplInterface {
    c10::DeviceType type() const override { return kType; }
    c10::Device getDevice() const override { return current_device(); }
    c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }
    void setDevice(c10::Device device) const override {
        TORCH_CHECK(device.index() < kDevices, "there is no ", device, "; there are ",
                    int{kDevices}, " test devices");
        uncheckedSetDevice(device);
    }
    void uncheckedSetDevice(c10::Device device) const noexcept override {
        if (device.index() >= 0) device_now = device.index();
    }
    c10::Device exchangeDevice(c10::Device device) const override {
        const c10::Device before = getDevice();
        setDevice(device);
        return before;
    }

    c10::Stream getStream(c10::Device device) const override { return current_stream(device); }
    c10::Stream getDefaultStream(c10::Device device) const override { return stream_of(device, 0); }
    c10::Stream getNewStream(c10::Device device, int) const override {
        return stream_of(device, new_stream(with_index(device)));
    }
    c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
        return getNewStream(device, 0);
    }
    c10::Stream exchangeStream(c10::Stream given) const override {
        const c10::Stream before = getStream(given.device());
        streams_now[given.device_index()] = given.id();
        return before;
    }
    void* getStreamNativeHandle(const c10::Stream given) const override {
        return reinterpret_cast<void*>(given.id());
    }
    bool queryStream(const c10::Stream&) const override { return true; }
    void synchronizeStream(const c10::Stream& given) const override {
        tell(kWait, "Stream.synchronize");
        synchronize_stream(given);
    }
    void synchronizeDevice(c10::DeviceIndex index) const override {
        tell(kWait, "synchronize");
        synchronize_device(c10::Device(kType, index));
    }
    void recordDataPtrOnStream(const c10::DataPtr& memory,
                               const c10::Stream& given) const override {
        record_stream(memory.get_context(), given);
    }

    void record(void** event, const c10::Stream& given, c10::DeviceIndex,
                c10::EventFlag) const override {
        record_event(event, given);
    }
    void block(void* event, const c10::Stream& given) const override { wait_event(event, given); }
    void destroyEvent(void* event, c10::DeviceIndex index) const noexcept override {
        destroy_event(event, c10::Device(kType, index));
    }
    bool queryEvent(void*) const override { return true; }
    void synchronizeEvent(void* event) const override {
        tell(kWait, "Event.synchronize");
        synchronize_event(event, current_device());
    }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct DeviceGenerator final : at::CPUGeneratorImpl {
    explicit DeviceGenerator(c10::DeviceIndex index) {
        device_ = c10::Device(kType, index);
        key_set_ = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);
    }
};

struct Hooks final : at::PrivateUse1HooksInterface {
    bool isBuilt() const override { return true; }
    bool isAvailable() const override { return true; }
    bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
    c10::DeviceIndex deviceCount() const override { return kDevices; }
    void setCurrentDevice(c10::DeviceIndex index) const override {
        Guard().setDevice(c10::Device(kType, index));
    }
    c10::DeviceIndex getCurrentDevice() const override { return device_now; }
    c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
        return Guard().exchangeDevice(c10::Device(kType, index)).index();
    }
    c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override {
        return exchangeDevice(index);
    }
    bool isPinnedPtr(const void* address) const override { return is_pinned(address); }
    c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
    const at::Generator& getDefaultGenerator(c10::DeviceIndex index) const override {
        static std::array<at::Generator, kDevices> all = [] {
            std::array<at::Generator, kDevices> made;
            for (c10::DeviceIndex i = 0; i < kDevices; ++i)
                made[i] = at::make_generator<DeviceGenerator>(i);
            return made;
        }();
        return all.at(index < 0 ? device_now : index);
    }
    at::Generator getNewGenerator(c10::DeviceIndex index) const override {
        return at::make_generator<DeviceGenerator>(index < 0 ? device_now : index);
    }
    void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
        c10::DataPtr fresh = device_allocator.allocate(bytes);
        std::memcpy(fresh.mutable_get(), storage.data(), std::min(bytes, storage.nbytes()));
        storage.set_data_ptr(std::move(fresh));
        storage.set_nbytes(bytes);
    }
};

const Hooks& hooks() {
    static Hooks* made = new Hooks;
    return *made;
}

const bool registered = [] {
    at::RegisterPrivateUse1HooksInterface(const_cast<Hooks*>(&hooks()));
    return true;
}();

}  // namespace

void tell(What what, const std::string& name) {
    if (const Watcher found = watcher) found(what, name.c_str(), streams_now[device_now]);
}

c10::Device current_device() { return {kType, device_now}; }
c10::Stream current_stream(c10::Device device) {
    return stream_of(device, streams_now[with_index(device).index()]);
}
void record_stream(const void* memory, c10::Stream stream) {
    device_memory().record(memory, stream.id());
}
c10::Allocator* allocator() { return &device_allocator; }
bool is_pinned(const void* address) { return pinned_memory().holds(address); }
at::Generator default_generator(c10::DeviceIndex index) {
    return hooks().getDefaultGenerator(index);
}

extern "C" __attribute__((visibility("default"))) void standin_watch(Watcher given) {
    watcher = given;
}
extern "C" __attribute__((visibility("default"))) void standin_open(const char* driver) {
    open_driver(driver);
}
extern "C" __attribute__((visibility("default"))) void standin_order(int on) {
    const int64_t number = order(on);
    ordering = on ? number : 0;
}

}  // namespace standin
