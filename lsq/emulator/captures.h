// Captures: what is submitted to a stream is recorded as a graph, which runs as often as it is launched.
#pragma once

#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "streams.h"

namespace emulator {

struct Node {
    std::string what;
    Work work;
    std::vector<size_t> after;  // nodes
    size_t branch;              // which of the captured streams did it
};

struct Graph {
    Context* context;
    std::vector<Node> nodes;
    size_t branches = 1;
};

struct Capture {
    Stream* origin;
    int mode;
    std::thread::id thread;
    Graph graph;
    std::vector<Stream*> streams;
    std::string fault;  // that ended it before its time
    bool ended = false;
};

// Appends a node to the graph of a captured stream.
int record(Stream& stream, const std::string& what, const Work& work);

// Lets a stream wait for an event, one of which is captured.
int wait_in_capture(Stream& stream, const Event& event);

// A call that waits for the device is refused in a capture, which it ends.
int refuse_in_capture(Stream& stream, const char* call);
int refuse_captured_event(Capture& capture, const char* call);

// A call that may wait for the device by itself, such as one that allocates, likewise.
int refuse_unsafe(const char* call);

// Nothing can come of a capture any more; returns `result`.
int invalidate(Capture& capture, int result, const std::string& message);

}  // namespace emulator
