#include "report.h"

#include <algorithm>
#include <cstdio>
#include <cstring>

namespace emulator {

namespace {

std::string describe(Index index) {
    return "(" + std::to_string(index.x) + ", " + std::to_string(index.y) + ", " + std::to_string(index.z) + ")";
}

std::string describe_wait(const Thread& thread) {
    if (thread.state == State::finished) return " finished";
    const std::string place = std::string(": wait at ") + thread.operation + " (" + describe(thread.site);
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
    std::vector<std::string> waits;
    std::vector<std::vector<const Thread*>> groups;
    for (const Thread& thread : threads) {
        const std::string wait = describe_wait(thread);
        const size_t group = std::find(waits.begin(), waits.end(), wait) - waits.begin();
        if (group == waits.size()) {
            waits.push_back(wait);
            groups.emplace_back();
        }
        groups[group].push_back(&thread);
    }
    std::string text;
    for (size_t group = 0; group < groups.size(); ++group) {
        text += (group ? "; " : "") + describe(*groups[group].front());
        if (groups[group].size() > 1) text += " and " + std::to_string(groups[group].size() - 1) + " more";
        text += waits[group];
    }
    return text;
}

bool same(Site a, Site b) { return a.line == b.line && std::strcmp(a.file, b.file) == 0; }

}  // namespace emulator
