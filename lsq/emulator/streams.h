// Streams, events, captures and graphs. submit() returns after the work; order.h keeps its order.
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

    // While captured: the capture, its branch of the graph, and the last nodes.
    std::shared_ptr<Capture> capture;
    size_t branch = 0;
    std::vector<size_t> last;
};

// Finds a stream of the current context; 0 and 1 are its null stream.
Stream& find_stream(const void* handle);

// Does the work, or records it if the stream is captured.
void submit(Stream& stream, const std::string& what, const Work& work);

// Does the work in a lane, never in a graph.
void perform(Lane& lane, const std::string& what, const Work& work);

// Orders a stream's next work behind the host's knowledge, and the null stream or the blocking
// ones.
void order_behind_others(Stream& stream);

// The host waits for all streams of a context.
void synchronize(Context& context);

// Fails if the stream is captured, and ends that capture.
void refuse_in_capture(Stream& stream, Result result, const std::string& message);

// Fails and ends the capture if one forbids calls that may wait for the device.
void refuse_unsafe(const char* call);

}  // namespace emulator
