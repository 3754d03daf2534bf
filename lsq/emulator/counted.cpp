#include "counted.h"

#include <algorithm>
#include <initializer_list>

namespace emulator {

namespace {

std::string quoted(const std::string& words) { return '"' + words + '"'; }

std::string listed(std::initializer_list<int64_t> numbers) {
    std::string found = "[";
    for (const int64_t number : numbers) found += (found.size() > 1 ? "," : "") + std::to_string(number);
    return found + "]";
}

template <typename Items, typename Write>
std::string joined(const Items& items, const Write& write) {
    std::string found = "[";
    for (const auto& item : items) found += (found.size() > 1 ? "," : "") + write(item);
    return found + "]";
}

std::string written(const Region& region) {
    return joined(region.traffic, [](const Traffic& one) {
        const int64_t touched = std::count(one.touched.begin(), one.touched.end(), true);
        return listed({one.requests, one.bytes, one.sectors, touched});
    });
}

std::string written(const Record& record) {
    const Shared& shared = record.shared;
    return "{\"kernel\":" + quoted(record.kernel) + ",\"module\":" + quoted(record.module) +
           ",\"regions\":" + joined(record.regions, [](const Region& one) { return written(one); }) +
           ",\"shared\":" + listed({shared.requests, shared.passes, shared.least}) + ",\"blocks\":" +
           joined(record.blocks, [](const Block& one) {
               return listed({static_cast<int64_t>(one.offset), one.warps, one.lanes});
           }) + "}";
}

}  // namespace

std::string in_json(const std::vector<Record>& records) {
    return joined(records, [](const Record& record) { return written(record); });
}

}  // namespace emulator
