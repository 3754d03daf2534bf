// Streams and events. Work has finished when it has been submitted; what streams and events order is kept in order.h.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "contexts.h"
#include "order.h"

namespace emulator {

struct Capture;

// What a stream does: it returns what went wrong in words, or nothing.
using Work = std::function<std::string()>;

struct Stream {
    Stream(Context& context, bool blocking, const std::string& name);

    Context& context;
    bool blocking;  // waits for the null stream, and the null stream for it
    Lane lane;

    // While it is captured: by what, as which branch of the graph, and the nodes that the next one comes after.
    std::shared_ptr<Capture> capture;
    size_t branch = 0;
    std::vector<size_t> last;
};

struct Event {
    Context& context;
    bool recorded = false;
    Clock clock;

    // Recorded in a captured stream: the capture, and the nodes that it stands behind.
    std::shared_ptr<Capture> capture;
    std::vector<size_t> last;
};

// Of a handle; 0 and 1 are the null stream of the current context. Fails where the stream belongs to another context.
int find_stream(const void* handle, Stream*& stream);

// Streams of a context that live, its null stream among them.
std::vector<Stream*> streams_of(Context& context);

// Does the work, or records it where the stream is captured.
int submit(Stream& stream, const std::string& what, const Work& work);

// Does the work in a lane, and in no graph.
int perform(Lane& lane, const std::string& what, const Work& work);

// What a stream's next work comes after: what the host knows, and the null stream or the blocking ones.
void order_behind_others(Stream& stream);

// The host waits for all streams of a context.
int synchronize(Context& context);

}  // namespace emulator
