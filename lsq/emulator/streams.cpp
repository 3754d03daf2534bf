#include "streams.h"

#include <algorithm>
#include <map>
#include <set>
#include <thread>

namespace emulator {

struct Node {
    std::string what;
    Work work;
    std::vector<size_t> after;  // nodes
    size_t branch;              // the captured stream that did it
};

struct Graph {
    Context* context;
    std::vector<Node> nodes;
    size_t branches = 1;
};

// Records work of its streams as a graph.
struct Capture {
    Stream* origin;
    int mode;
    std::thread::id thread;
    Graph graph;
    std::vector<Stream*> streams;
    std::string fault;  // that ended it before its time
    bool ended = false;
};

namespace {

constexpr unsigned NON_BLOCKING = 1;               // CU_STREAM_NON_BLOCKING
constexpr uintptr_t LEGACY = 1;                    // CU_STREAM_LEGACY
constexpr int MODE_GLOBAL = 0, MODE_RELAXED = 2;  // CU_STREAM_CAPTURE_MODE_*

struct Event {
    Context& context;
    bool recorded = false;
    Clock clock;

    // The capture of its stream, and the nodes before it.
    std::shared_ptr<Capture> capture;
    std::vector<size_t> last;
};

struct Executable {
    Graph graph;
    std::vector<Lane> lanes;  // of its branches
    Clock clock;              // of its last launch
};

template <typename T>
using Handles = std::map<const void*, std::shared_ptr<T>>;

Handles<Stream> streams;
Handles<Event> events;
Handles<Graph> graphs;
Handles<Executable> executables;
std::vector<std::shared_ptr<Capture>> captures;
unsigned streams_made = 0;

template <typename T>
const void* keep(Handles<T>& handles, std::shared_ptr<T> made) {
    const void* handle = made.get();
    handles[handle] = std::move(made);
    return handle;
}

template <typename T>
std::shared_ptr<T> find(const Handles<T>& handles, const void* handle, Result result,
                        const char* kind) {
    const auto found = handles.find(handle);
    if (found == handles.end()) fail(result, std::string("there is no such ") + kind);
    return found->second;
}

std::shared_ptr<Event> find_event(const void* handle) {
    current_context();
    return find(events, handle, INVALID_HANDLE, "event");
}

Stream& null_stream(Context& context) {
    if (!context.null_stream)
        context.null_stream = std::make_shared<Stream>(context, true, "stream 0");
    return *context.null_stream;
}

// All streams of a context.
std::vector<Stream*> streams_of(Context& context) {
    std::vector<Stream*> found = {&null_stream(context)};
    for (const auto& [handle, stream] : streams) {
        if (&stream->context == &context) found.push_back(stream.get());
    }
    return found;
}

[[noreturn]] void invalidate(Capture& capture, Result result, const std::string& message) {
    capture.fault = message;
    fail(result, message);
}

[[noreturn]] void refuse_invalid(const Capture& capture) {
    fail(CAPTURE_INVALIDATED,
         "the capture was ended by what is not allowed in one: " + capture.fault);
}

[[noreturn]] void refuse_captured_event(Capture& capture, const char* call) {
    const std::string message = std::string(call) + ": the event was recorded in a captured stream";
    if (capture.ended) fail(CAPTURED_EVENT, message);
    invalidate(capture, CAPTURED_EVENT, message);
}

void refuse_captured(Stream& stream, const std::string& call) {
    refuse_in_capture(stream, CAPTURE_UNSUPPORTED,
                      call + " is not allowed for " + stream.lane.name + ", which is captured");
}

// The host waits for a stream.
void wait_for(Stream& stream, const char* call) {
    refuse_captured(stream, call);
    order_behind_others(stream);
    join(host().clock, stream.lane.clock);
}

void wait_for(const Event& event, const char* call) {
    if (event.capture) refuse_captured_event(*event.capture, call);
    join(host().clock, event.clock);
}

// Appends a node to the graph of a captured stream.
void record(Stream& stream, const std::string& what, const Work& work) {
    Capture& capture = *stream.capture;
    if (!capture.fault.empty()) refuse_invalid(capture);
    capture.graph.nodes.push_back({what, work, stream.last, stream.branch});
    stream.last = {capture.graph.nodes.size() - 1};
}

// A stream waits for an event; one of both is captured.
void wait_in_capture(Stream& stream, const Event& event) {
    if (!event.capture) {
        if (!event.recorded) return;
        invalidate(*stream.capture, CAPTURE_ISOLATION,
                   stream.lane.name +
                       " is captured and cannot wait for an event recorded outside of the capture");
    }
    if (event.capture->ended) refuse_captured_event(*event.capture, "cuStreamWaitEvent");
    if (!event.capture->fault.empty()) refuse_invalid(*event.capture);
    if (stream.capture && stream.capture != event.capture) {
        stream.capture->fault = "two captures would become one";
        invalidate(*event.capture, CAPTURE_MERGE, "two captures would become one");
    }
    if (&stream == stream.context.null_stream.get()) {
        invalidate(*event.capture, CAPTURE_IMPLICIT,
                   stream.lane.name + " cannot take part in a capture");
    }
    if (!stream.capture) {
        stream.capture = event.capture;
        stream.branch = event.capture->graph.branches++;
        event.capture->streams.push_back(&stream);
    }
    std::set<size_t> last(stream.last.begin(), stream.last.end());
    last.insert(event.last.begin(), event.last.end());
    stream.last.assign(last.begin(), last.end());
}

// A stream of the capture that the origin has not waited for, or null.
const Stream* unjoined(const Capture& capture) {
    std::set<size_t> joined(capture.origin->last.begin(), capture.origin->last.end());
    for (size_t i = capture.graph.nodes.size(); i-- > 0;) {
        const std::vector<size_t>& after = capture.graph.nodes[i].after;
        if (joined.count(i)) joined.insert(after.begin(), after.end());
    }
    for (const Stream* stream : capture.streams) {
        for (size_t node : stream->last) {
            if (!joined.count(node)) return stream;
        }
    }
    return nullptr;
}

void leave(const std::shared_ptr<Capture>& capture) {
    for (Stream* stream : capture->streams) {
        stream->capture = nullptr;
        stream->last.clear();
    }
    capture->ended = true;
    captures.erase(std::remove(captures.begin(), captures.end(), capture), captures.end());
}

// Runs the nodes in the order of their capture, between the old and the new `clock`.
void run(Executable& executable, Clock& clock) {
    std::vector<Clock> ends;
    join(clock, executable.clock);
    const Clock begin = clock;
    for (const Node& node : executable.graph.nodes) {
        Lane& lane = executable.lanes[node.branch];
        join(lane.clock, begin);
        for (size_t before : node.after) join(lane.clock, ends[before]);
        perform(lane, node.what, node.work);
        ends.push_back(lane.clock);
        join(clock, lane.clock);
    }
    executable.clock = clock;
}

}  // namespace

Stream::Stream(Context& context, bool blocking, const std::string& name)
    : context(context), blocking(blocking),
      lane(name + (context.device ? " of device " + std::to_string(context.device) : ""),
           context.device) {}

Stream& find_stream(const void* handle) {
    Context& context = current_context();
    if (reinterpret_cast<uintptr_t>(handle) <= LEGACY) return null_stream(context);
    Stream& stream = *find(streams, handle, INVALID_HANDLE, "stream");
    if (&stream.context == &context) return stream;
    fail(INVALID_HANDLE, stream.lane.name +
                             " does not belong to the current context, which is that of device " +
                             std::to_string(context.device));
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

void submit(Stream& stream, const std::string& what, const Work& work) {
    if (stream.capture) return record(stream, what, work);
    if (&stream == &null_stream(stream.context)) {
        for (Stream* other : streams_of(stream.context)) {
            if (!other->blocking || !other->capture) continue;
            invalidate(*other->capture, CAPTURE_IMPLICIT,
                       what + " on " + stream.lane.name + " would wait for " + other->lane.name +
                           ", which is captured; make that one non-blocking");
        }
    }
    order_behind_others(stream);
    perform(stream.lane, what, work);
}

void perform(Lane& lane, const std::string& what, const Work& work) {
    begin_piece(lane, what);
    const std::string fault = work();
    end_piece();
    if (!fault.empty()) fail(LAUNCH_FAILED, fault);
}

void synchronize(Context& context) {
    for (Stream* stream : streams_of(context)) wait_for(*stream, "cuCtxSynchronize");
}

void refuse_in_capture(Stream& stream, Result result, const std::string& message) {
    if (stream.capture) invalidate(*stream.capture, result, message);
}

void refuse_unsafe(const char* call) {
    for (const auto& capture : captures) {
        const bool own = capture->thread == std::this_thread::get_id();
        if (capture->mode == MODE_RELAXED || (capture->mode != MODE_GLOBAL && !own)) continue;
        invalidate(*capture, CAPTURE_UNSUPPORTED,
                   std::string(call) + " may wait for the device, and a stream is captured");
    }
}

}  // namespace emulator

using namespace emulator;

DRIVER cuCtxSynchronize() {
    return guarded([] { synchronize(current_context()); });
}

DRIVER cuStreamCreate(const void** handle, unsigned flags) {
    return guarded([&] {
        Context& context = current_context();
        const std::string name = "stream " + std::to_string(++streams_made);
        *handle = keep(streams, std::make_shared<Stream>(context, !(flags & NON_BLOCKING), name));
    });
}

DRIVER cuStreamDestroy_v2(const void* handle) {
    return guarded([&] {
        Stream& stream = *find(streams, handle, INVALID_HANDLE, "stream");
        refuse_captured(stream, "cuStreamDestroy");
        streams.erase(handle);
    });
}

DRIVER cuStreamSynchronize(const void* handle) {
    return guarded([&] { wait_for(find_stream(handle), "cuStreamSynchronize"); });
}

DRIVER cuStreamQuery(const void* handle) {
    return guarded([&] { wait_for(find_stream(handle), "cuStreamQuery"); });
}

DRIVER cuStreamWaitEvent(const void* handle, const void* event_handle, unsigned) {
    return guarded([&] {
        Stream& stream = find_stream(handle);
        const auto event = find_event(event_handle);
        if (stream.capture || event->capture) return wait_in_capture(stream, *event);
        join(stream.lane.clock, event->clock);
    });
}

DRIVER cuEventCreate(const void** handle, unsigned) {
    return guarded(
        [&] { *handle = keep(events, std::shared_ptr<Event>(new Event{current_context()})); });
}

DRIVER cuEventDestroy_v2(const void* handle) {
    return guarded([&] { events.erase(find(events, handle, INVALID_HANDLE, "event").get()); });
}

DRIVER cuEventRecord(const void* handle, const void* stream_handle) {
    return guarded([&] {
        Stream& stream = find_stream(stream_handle);
        const auto event = find_event(handle);
        if (&event->context != &stream.context) {
            fail(INVALID_HANDLE, "the event does not belong to the context of " + stream.lane.name);
        }
        if (!stream.capture) order_behind_others(stream);
        event->recorded = true;
        event->clock = stream.lane.clock;
        event->capture = stream.capture;
        event->last = stream.last;
    });
}

DRIVER cuEventSynchronize(const void* handle) {
    return guarded([&] { wait_for(*find_event(handle), "cuEventSynchronize"); });
}

DRIVER cuStreamBeginCapture_v2(const void* handle, int mode) {
    return guarded([&] {
        Stream& stream = find_stream(handle);
        if (mode < MODE_GLOBAL || mode > MODE_RELAXED)
            fail(INVALID_VALUE, "mode " + std::to_string(mode));
        if (&stream == stream.context.null_stream.get())
            fail(CAPTURE_UNSUPPORTED, "stream 0 cannot be captured");
        if (stream.capture) fail(ILLEGAL_STATE, stream.lane.name + " is captured already");
        stream.capture = std::make_shared<Capture>();
        *stream.capture = {
            &stream, mode, std::this_thread::get_id(), {&stream.context, {}}, {&stream}, "", false};
        stream.branch = 0;
        captures.push_back(stream.capture);
    });
}

DRIVER cuStreamIsCapturing(const void* handle, int* status) {
    return guarded([&] {
        const auto& capture = find_stream(handle).capture;
        *status = !capture ? 0 : capture->fault.empty() ? 1 : 2;
    });
}

DRIVER cuStreamEndCapture(const void* handle, const void** graph) {
    *graph = nullptr;
    return guarded([&] {
        Stream& stream = find_stream(handle);
        const std::shared_ptr<Capture> capture = stream.capture;
        if (!capture) fail(ILLEGAL_STATE, stream.lane.name + " is not captured");
        if (&stream != capture->origin) {
            invalidate(*capture, CAPTURE_UNMATCHED,
                       "the capture did not begin in " + stream.lane.name);
        }
        if (capture->mode != MODE_RELAXED && capture->thread != std::this_thread::get_id()) {
            fail(CAPTURE_WRONG_THREAD, "the capture was begun by another thread");
        }
        const Stream* left = unjoined(*capture);
        leave(capture);
        if (!capture->fault.empty()) refuse_invalid(*capture);
        if (left) {
            fail(CAPTURE_UNJOINED, "work was captured in " + left->lane.name + " for which " +
                                       stream.lane.name + " has not waited");
        }
        *graph = keep(graphs, std::make_shared<Graph>(capture->graph));
    });
}

DRIVER cuGraphInstantiateWithFlags(const void** handle, const void* graph, unsigned long long) {
    return guarded([&] {
        const auto made = std::make_shared<Executable>();
        made->graph = *find(graphs, graph, INVALID_VALUE, "graph");
        for (size_t branch = 0; branch < made->graph.branches; ++branch) {
            made->lanes.emplace_back("branch " + std::to_string(branch) + " of a graph",
                                     made->graph.context->device);
        }
        *handle = keep(executables, made);
    });
}

DRIVER cuGraphLaunch(const void* handle, const void* stream_handle) {
    return guarded([&] {
        Stream& stream = find_stream(stream_handle);
        const auto executable = find(executables, handle, INVALID_VALUE, "graph");
        refuse_in_capture(stream, NOT_SUPPORTED, "the emulator captures no graph in another");
        if (executable->graph.context != &stream.context) {
            fail(INVALID_HANDLE, "the graph does not belong to the context of " + stream.lane.name);
        }
        order_behind_others(stream);
        run(*executable, stream.lane.clock);
    });
}

DRIVER cuGraphDestroy(const void* graph) {
    return guarded([&] { graphs.erase(find(graphs, graph, INVALID_VALUE, "graph").get()); });
}

int emulator_submit(const void* context, const void* handle, const char* what,
                    const char* (*work)(const void*), const void* data, size_t bytes) {
    return guarded([&] {
        Stream& stream = find_stream(handle);
        if (context != &stream.context)
            fail(INVALID_CONTEXT, std::string(what) + " belongs to another context");
        const auto* first = static_cast<const unsigned char*>(data);
        const std::vector<unsigned char> copy(first, first + bytes);
        submit(stream, what, [work, copy, name = std::string(what)] {
            const char* fault = work(copy.data());
            return fault ? name + " " + fault : "";
        });
    });
}
