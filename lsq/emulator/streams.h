// Streams, events, captures and graphs. Submitted work has finished when submit() returns; order.h
// keeps what streams and events order.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "contexts.h"
#include "order.h"

namespace emulator {

struct Capture;

// Work of a stream. Returns a message about what went wrong, or nothing.
using Work = std::function<std::string()>;

struct Stream {
    Stream(Context& context, bool blocking, const std::string& name);

    Context& context;
    bool blocking;  // waits for the null stream, and the null stream for it
    Lane lane;

    // While it is captured: the capture, its branch of the graph, and the nodes that its next node
    // comes after.
    std::shared_ptr<Capture> capture;
    size_t branch = 0;
    std::vector<size_t> last;
};

// Finds a stream by its handle; 0 and 1 are the null stream of the current context. Fails where the
// stream belongs to another context.
Stream& find_stream(const void* handle);

// Does the work, or records it where the stream is captured.
void submit(Stream& stream, const std::string& what, const Work& work);

// Does the work in a lane, never in a graph.
void perform(Lane& lane, const std::string& what, const Work& work);

// Orders a stream's next work behind what the host knows, and behind the null stream or the
// blocking ones.
void order_behind_others(Stream& stream);

// The host waits for all streams of a context.
void synchronize(Context& context);

// Fails where the stream is captured, and ends that capture.
void refuse_in_capture(Stream& stream, Result result, const std::string& message);

// Fails where a capture forbids calls that may wait for the device, and ends that capture.
void refuse_unsafe(const char* call);

}  // namespace emulator
