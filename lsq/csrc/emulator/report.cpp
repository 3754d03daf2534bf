#include "report.h"

#include <cstdio>
#include <cstring>

namespace emulator {

namespace {

std::string describe(Index index) {
    return "(" + std::to_string(index.x) + ", " + std::to_string(index.y) + ", " + std::to_string(index.z) + ")";
}

std::string describe_wait(const Thread& thread) {
    if (thread.state == State::finished) return "finished";
    const std::string place = std::string(thread.operation) + " (" + describe(thread.site);
    if (thread.state == State::collective) return place + ", mask " + hexadecimal(thread.mask) + ")";
    return place + ")";
}

}  // namespace

std::string hexadecimal(uint64_t value) {
    char text[32];
    std::snprintf(text, sizeof text, "0x%llx", static_cast<unsigned long long>(value));
    return text;
}

std::string describe(Site site) {
    const char* slash = std::strrchr(site.file, '/');
    return std::string(slash ? slash + 1 : site.file) + ":" + std::to_string(site.line);
}

std::string describe(const Thread& thread) { return "thread " + describe(thread.index); }

std::string describe_block(const char* kernel, Index block) {
    return std::string("kernel ") + kernel + ", block " + describe(block) + ": ";
}

std::string describe_all(const std::vector<Thread>& threads) {
    constexpr int LONGEST = 16;
    std::string text;
    int groups = 0;
    for (size_t first = 0, next; first < threads.size(); first = next) {
        const std::string wait = describe_wait(threads[first]);
        for (next = first + 1; next < threads.size() && describe_wait(threads[next]) == wait;) ++next;
        if (groups++ == LONGEST) return text + "; and so on";
        text += (first ? "; " : "") + describe(threads[first]);
        if (next - first > 1) text += " and the next " + std::to_string(next - first - 1);
        text += threads[first].state == State::finished ? ": finished" : ": wait at " + wait;
    }
    return text;
}

bool same(Site a, Site b) { return a.line == b.line && std::strcmp(a.file, b.file) == 0; }

}  // namespace emulator
