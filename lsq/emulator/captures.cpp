#include "captures.h"

#include <algorithm>
#include <map>
#include <set>

#include "results.h"

namespace emulator {

namespace {

constexpr int MODE_GLOBAL = 0, MODE_RELAXED = 2;  // CU_STREAM_CAPTURE_MODE_*

struct Executable {
    Graph graph;
    std::vector<Lane> lanes;  // of its branches
    Clock clock;              // of its last launch
};

std::vector<std::shared_ptr<Capture>> captures;
std::map<const void*, std::shared_ptr<Graph>> graphs;
std::map<const void*, std::shared_ptr<Executable>> executables;

int refuse_invalid(const Capture& capture) {
    return fail(CAPTURE_INVALIDATED, "the capture was ended by what is not allowed in one: " + capture.fault);
}

void add_all(std::vector<size_t>& to, const std::vector<size_t>& from) {
    std::set<size_t> all(to.begin(), to.end());
    all.insert(from.begin(), from.end());
    to.assign(all.begin(), all.end());
}

// Nodes that `last` come after, they themselves among them.
std::set<size_t> before(const Graph& graph, const std::vector<size_t>& last) {
    std::set<size_t> found(last.begin(), last.end());
    for (size_t i = graph.nodes.size(); i-- > 0;) {
        if (found.count(i)) found.insert(graph.nodes[i].after.begin(), graph.nodes[i].after.end());
    }
    return found;
}

void leave(Capture& capture) {
    for (Stream* stream : capture.streams) {
        stream->capture = nullptr;
        stream->last.clear();
    }
    capture.ended = true;
    const auto is_it = [&](const std::shared_ptr<Capture>& one) { return one.get() == &capture; };
    captures.erase(std::remove_if(captures.begin(), captures.end(), is_it), captures.end());
}

// A stream whose work the origin has not waited for; null: none.
const Stream* unjoined(const Capture& capture) {
    const std::set<size_t> joined = before(capture.graph, capture.origin->last);
    for (const Stream* stream : capture.streams) {
        for (size_t node : stream->last) {
            if (!joined.count(node)) return stream;
        }
    }
    return nullptr;
}

// Runs the nodes in the order of their capture; `clock` is what all come after and gets what comes of them.
std::string run(Executable& executable, Clock& clock) {
    std::vector<Clock> ends;
    join(clock, executable.clock);
    const Clock begin = clock;
    for (const Node& node : executable.graph.nodes) {
        Lane& lane = executable.lanes[node.branch];
        join(lane.clock, begin);
        for (size_t one : node.after) join(lane.clock, ends[one]);
        begin_piece(lane, node.what);
        const std::string fault = node.work();
        end_piece();
        if (!fault.empty()) return fault;
        ends.push_back(lane.clock);
        join(clock, lane.clock);
    }
    executable.clock = clock;
    return "";
}

}  // namespace

int invalidate(Capture& capture, int result, const std::string& message) {
    capture.fault = message;
    return fail(result, message);
}

int record(Stream& stream, const std::string& what, const Work& work) {
    Capture& capture = *stream.capture;
    if (!capture.fault.empty()) return refuse_invalid(capture);
    capture.graph.nodes.push_back({what, work, stream.last, stream.branch});
    stream.last = {capture.graph.nodes.size() - 1};
    return SUCCESS;
}

int wait_in_capture(Stream& stream, const Event& event) {
    if (!event.capture) {
        if (!event.recorded) return SUCCESS;
        return invalidate(*stream.capture, CAPTURE_ISOLATION,
                          stream.lane.name + " is captured and cannot wait for an event recorded outside of the capture");
    }
    if (event.capture->ended) return refuse_captured_event(*event.capture, "cuStreamWaitEvent");
    if (!event.capture->fault.empty()) return refuse_invalid(*event.capture);
    if (stream.capture && stream.capture != event.capture) {
        stream.capture->fault = "two captures would become one";
        return invalidate(*event.capture, CAPTURE_MERGE, "two captures would become one");
    }
    if (&stream == stream.context.null_stream.get()) {
        return invalidate(*event.capture, CAPTURE_IMPLICIT, stream.lane.name + " cannot take part in a capture");
    }
    if (!stream.capture) {
        stream.capture = event.capture;
        stream.branch = event.capture->graph.branches++;
        event.capture->streams.push_back(&stream);
    }
    add_all(stream.last, event.last);
    return SUCCESS;
}

int refuse_in_capture(Stream& stream, const char* call) {
    if (!stream.capture) return SUCCESS;
    return invalidate(*stream.capture, CAPTURE_UNSUPPORTED,
                      std::string(call) + " is not allowed for " + stream.lane.name + ", which is captured");
}

int refuse_captured_event(Capture& capture, const char* call) {
    const std::string message = std::string(call) + ": the event was recorded in a captured stream";
    return capture.ended ? fail(CAPTURED_EVENT, message) : invalidate(capture, CAPTURED_EVENT, message);
}

int refuse_unsafe(const char* call) {
    for (const auto& capture : captures) {
        const bool own = capture->thread == std::this_thread::get_id();
        if (capture->mode == MODE_RELAXED || (capture->mode != MODE_GLOBAL && !own)) continue;
        return invalidate(*capture, CAPTURE_UNSUPPORTED,
                          std::string(call) + " may wait for the device, and a stream is captured");
    }
    return SUCCESS;
}

}  // namespace emulator

using namespace emulator;

DRIVER cuStreamBeginCapture_v2(const void* handle, int mode) {
    HOLD_DRIVER;
    Stream* stream;
    if (const int refused = find_stream(handle, stream)) return refused;
    if (mode < MODE_GLOBAL || mode > MODE_RELAXED) return fail(INVALID_VALUE, "mode " + std::to_string(mode));
    if (stream == stream->context.null_stream.get()) return fail(CAPTURE_UNSUPPORTED, "stream 0 cannot be captured");
    if (stream->capture) return fail(ILLEGAL_STATE, stream->lane.name + " is captured already");
    stream->capture = std::make_shared<Capture>();
    *stream->capture = {stream, mode, std::this_thread::get_id(), {&stream->context, {}}, {stream}, "", false};
    stream->branch = 0;
    captures.push_back(stream->capture);
    return SUCCESS;
}

DRIVER cuStreamIsCapturing(const void* handle, int* status) {
    HOLD_DRIVER;
    Stream* stream;
    if (const int refused = find_stream(handle, stream)) return refused;
    *status = !stream->capture ? 0 : stream->capture->fault.empty() ? 1 : 2;
    return SUCCESS;
}

DRIVER cuStreamEndCapture(const void* handle, const void** graph) {
    HOLD_DRIVER;
    Stream* stream;
    *graph = nullptr;
    if (const int refused = find_stream(handle, stream)) return refused;
    const std::shared_ptr<Capture> capture = stream->capture;
    if (!capture) return fail(ILLEGAL_STATE, stream->lane.name + " is not captured");
    if (stream != capture->origin) {
        return invalidate(*capture, CAPTURE_UNMATCHED, "the capture did not begin in " + stream->lane.name);
    }
    if (capture->mode != MODE_RELAXED && capture->thread != std::this_thread::get_id()) {
        return fail(CAPTURE_WRONG_THREAD, "the capture was begun by another thread");
    }
    const Stream* left = unjoined(*capture);
    leave(*capture);
    if (!capture->fault.empty()) return refuse_invalid(*capture);
    if (left) {
        return fail(CAPTURE_UNJOINED, "work was captured in " + left->lane.name + " for which " + stream->lane.name +
                                          " has not waited");
    }
    const auto made = std::make_shared<Graph>(capture->graph);
    graphs[made.get()] = made;
    *graph = made.get();
    return SUCCESS;
}

DRIVER cuGraphInstantiateWithFlags(const void** handle, const void* graph, unsigned long long) {
    HOLD_DRIVER;
    const auto found = graphs.find(graph);
    if (found == graphs.end()) return fail(INVALID_VALUE, "there is no such graph");
    const auto made = std::make_shared<Executable>();
    made->graph = *found->second;
    for (size_t branch = 0; branch < made->graph.branches; ++branch) {
        made->lanes.emplace_back("branch " + std::to_string(branch) + " of a graph", made->graph.context->device);
    }
    executables[made.get()] = made;
    *handle = made.get();
    return SUCCESS;
}

DRIVER cuGraphLaunch(const void* handle, const void* stream_handle) {
    HOLD_DRIVER;
    Stream* stream;
    if (const int refused = find_stream(stream_handle, stream)) return refused;
    const auto found = executables.find(handle);
    if (found == executables.end()) return fail(INVALID_VALUE, "there is no such graph");
    if (stream->capture) return invalidate(*stream->capture, NOT_SUPPORTED, "the emulator captures no graph in another");
    if (found->second->graph.context != &stream->context) {
        return fail(INVALID_HANDLE, "the graph does not belong to the context of " + stream->lane.name);
    }
    order_behind_others(*stream);
    const std::string fault = run(*found->second, stream->lane.clock);
    return fault.empty() ? SUCCESS : fail(LAUNCH_FAILED, fault);
}

DRIVER cuGraphDestroy(const void* graph) {
    HOLD_DRIVER;
    return graphs.erase(graph) ? SUCCESS : fail(INVALID_VALUE, "there is no such graph");
}

DRIVER cuGraphExecDestroy(const void* handle) {
    HOLD_DRIVER;
    return executables.erase(handle) ? SUCCESS : fail(INVALID_VALUE, "there is no such graph");
}
