#include "streams.h"

#include <map>

#include "captures.h"
#include "results.h"
#include "work.h"

namespace emulator {

namespace {

constexpr unsigned NON_BLOCKING = 1;  // CU_STREAM_NON_BLOCKING
constexpr uintptr_t LEGACY = 1;       // CU_STREAM_LEGACY

std::map<const void*, std::shared_ptr<Stream>> streams;
std::map<const void*, std::shared_ptr<Event>> events;
unsigned made = 0;

Stream& null_stream(Context& context) {
    if (!context.null_stream) context.null_stream = std::make_shared<Stream>(context, true, "stream 0");
    return *context.null_stream;
}

int find_event(const void* handle, std::shared_ptr<Event>& event) {
    Context* context;
    if (const int refused = find_context(context)) return refused;
    const auto found = events.find(handle);
    if (found == events.end()) return fail(INVALID_HANDLE, "there is no such event");
    event = found->second;
    return SUCCESS;
}

// The host learns that the work of a stream is over.
int wait_for(Stream& stream, const char* call) {
    if (const int refused = refuse_in_capture(stream, call)) return refused;
    order_behind_others(stream);
    join(host().clock, stream.lane.clock);
    return SUCCESS;
}

int wait_for(const Event& event, const char* call) {
    if (event.capture) return refuse_captured_event(*event.capture, call);
    join(host().clock, event.clock);
    return SUCCESS;
}

}  // namespace

Stream::Stream(Context& context, bool blocking, const std::string& name)
    : context(context), blocking(blocking), lane(name + of_device(context.device), context.device) {}

int find_stream(const void* handle, Stream*& stream) {
    Context* context;
    if (const int refused = find_context(context)) return refused;
    if (reinterpret_cast<uintptr_t>(handle) <= LEGACY) {
        stream = &null_stream(*context);
        return SUCCESS;
    }
    const auto found = streams.find(handle);
    if (found == streams.end()) return fail(INVALID_HANDLE, "there is no such stream");
    stream = found->second.get();
    if (&stream->context == context) return SUCCESS;
    return fail(INVALID_HANDLE, stream->lane.name + " does not belong to the current context, which is that of device " +
                                    std::to_string(context->device));
}

std::vector<Stream*> streams_of(Context& context) {
    std::vector<Stream*> found = {&null_stream(context)};
    for (const auto& [handle, stream] : streams) {
        if (&stream->context == &context) found.push_back(stream.get());
    }
    return found;
}

void order_behind_others(Stream& stream) {
    join(stream.lane.clock, host().clock);
    Stream& null = null_stream(stream.context);
    if (&stream != &null) {
        if (stream.blocking) join(stream.lane.clock, null.lane.clock);
        return;
    }
    for (const Stream* other : streams_of(stream.context)) {
        if (other->blocking) join(stream.lane.clock, other->lane.clock);
    }
}

int submit(Stream& stream, const std::string& what, const Work& work) {
    if (stream.capture) return record(stream, what, work);
    if (&stream == &null_stream(stream.context)) {
        for (Stream* other : streams_of(stream.context)) {
            if (!other->blocking || !other->capture) continue;
            return invalidate(*other->capture, CAPTURE_IMPLICIT,
                              what + " on " + stream.lane.name + " would wait for " + other->lane.name +
                                  ", which is captured; make that one non-blocking");
        }
    }
    order_behind_others(stream);
    return perform(stream.lane, what, work);
}

int perform(Lane& lane, const std::string& what, const Work& work) {
    begin_piece(lane, what);
    const std::string fault = work();
    end_piece();
    return fault.empty() ? SUCCESS : fail(LAUNCH_FAILED, fault);
}

int synchronize(Context& context) {
    for (Stream* stream : streams_of(context)) {
        if (const int refused = wait_for(*stream, "cuCtxSynchronize")) return refused;
    }
    return SUCCESS;
}

}  // namespace emulator

using namespace emulator;

DRIVER cuStreamCreate(const void** handle, unsigned flags) {
    HOLD_DRIVER;
    Context* context;
    if (const int refused = find_context(context)) return refused;
    const auto stream = std::make_shared<Stream>(*context, !(flags & NON_BLOCKING), "stream " + std::to_string(++made));
    streams[stream.get()] = stream;
    *handle = stream.get();
    return SUCCESS;
}

DRIVER cuStreamDestroy_v2(const void* handle) {
    HOLD_DRIVER;
    const auto found = streams.find(handle);
    if (found == streams.end()) return fail(INVALID_HANDLE, "there is no such stream");
    if (const int refused = refuse_in_capture(*found->second, "cuStreamDestroy")) return refused;
    streams.erase(found);
    return SUCCESS;
}

DRIVER cuStreamSynchronize(const void* handle) {
    HOLD_DRIVER;
    Stream* stream;
    if (const int refused = find_stream(handle, stream)) return refused;
    return wait_for(*stream, "cuStreamSynchronize");
}

DRIVER cuStreamQuery(const void* handle) {
    HOLD_DRIVER;
    Stream* stream;
    if (const int refused = find_stream(handle, stream)) return refused;
    return wait_for(*stream, "cuStreamQuery");
}

DRIVER cuStreamWaitEvent(const void* handle, const void* event_handle, unsigned) {
    HOLD_DRIVER;
    Stream* stream;
    std::shared_ptr<Event> event;
    if (const int refused = find_stream(handle, stream)) return refused;
    if (const int refused = find_event(event_handle, event)) return refused;
    if (stream->capture || event->capture) return wait_in_capture(*stream, *event);
    join(stream->lane.clock, event->clock);
    return SUCCESS;
}

DRIVER cuEventCreate(const void** handle, unsigned) {
    HOLD_DRIVER;
    Context* context;
    if (const int refused = find_context(context)) return refused;
    const auto event = std::shared_ptr<Event>(new Event{*context});
    events[event.get()] = event;
    *handle = event.get();
    return SUCCESS;
}

DRIVER cuEventDestroy_v2(const void* handle) {
    HOLD_DRIVER;
    return events.erase(handle) ? SUCCESS : fail(INVALID_HANDLE, "there is no such event");
}

DRIVER cuEventRecord(const void* handle, const void* stream_handle) {
    HOLD_DRIVER;
    Stream* stream;
    std::shared_ptr<Event> event;
    if (const int refused = find_stream(stream_handle, stream)) return refused;
    if (const int refused = find_event(handle, event)) return refused;
    if (&event->context != &stream->context) {
        return fail(INVALID_HANDLE, "the event does not belong to the context of " + stream->lane.name);
    }
    if (!stream->capture) order_behind_others(*stream);
    event->recorded = true;
    event->clock = stream->lane.clock;
    event->capture = stream->capture;
    event->last = stream->last;
    return SUCCESS;
}

DRIVER cuEventSynchronize(const void* handle) {
    HOLD_DRIVER;
    std::shared_ptr<Event> event;
    if (const int refused = find_event(handle, event)) return refused;
    return wait_for(*event, "cuEventSynchronize");
}

DRIVER cuEventQuery(const void* handle) {
    HOLD_DRIVER;
    std::shared_ptr<Event> event;
    if (const int refused = find_event(handle, event)) return refused;
    return wait_for(*event, "cuEventQuery");
}

int emulator_submit(const void* context, const void* handle, const char* what, const char* (*work)(const void*),
                    const void* data, size_t bytes) {
    HOLD_DRIVER;
    Stream* stream;
    if (const int refused = find_stream(handle, stream)) return refused;
    if (context != &stream->context) return fail(INVALID_CONTEXT, std::string(what) + " belongs to another context");
    const auto* first = static_cast<const unsigned char*>(data);
    const std::vector<unsigned char> copy(first, first + bytes);
    return submit(*stream, what, [work, copy, name = std::string(what)] {
        const char* fault = work(copy.data());
        return fault ? name + " " + fault : "";
    });
}

const char* emulator_message() { return last_message().c_str(); }
