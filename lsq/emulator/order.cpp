#include "order.h"

#include <algorithm>
#include <array>
#include <map>
#include <memory>
#include <unordered_map>

#include "report.h"

namespace emulator {

bool watching = false;

namespace {

constexpr unsigned GRANULE = 16, PAGE = 4096;  // bytes of a granule, granules of a page
constexpr uint32_t CROWD = 1u << 31;           // marks a number of `crowds` instead of `pieces`
constexpr uint32_t NOBODY = 0;

enum class Kind { work, begun, ended };

struct Piece {
    Kind kind;
    int device;
    uint32_t lane, tick;
    std::string what, where;  // "kernel lsq_sum", "stream 2"
};

struct Granule {
    // Numbers of pieces; readers that nothing orders: of a crowd.
    uint32_t writer = NOBODY, reader = NOBODY;
};

struct Region {
    std::string name;
    int device;
    uintptr_t end;
    bool ended;
};

using Crowd = std::vector<uint32_t>;

uint32_t lanes = 0;
std::vector<Piece> pieces(1);
std::vector<Crowd> crowds;
std::map<Crowd, uint32_t> numbers_of_crowds;
std::unordered_map<uintptr_t, std::unique_ptr<std::array<Granule, PAGE>>> pages;
std::map<uintptr_t, Region> regions;  // by their begin
const Lane* current_lane = nullptr;
uint32_t current_piece = NOBODY;

uint32_t new_piece(Kind kind, Lane& lane, const std::string& what) {
    if (lane.clock.size() <= lane.number) lane.clock.resize(lane.number + 1);
    pieces.push_back({kind, lane.device, lane.number, ++lane.clock[lane.number], what, lane.name});
    return static_cast<uint32_t>(pieces.size() - 1);
}

Granule& granule_at(uintptr_t address) {
    static uintptr_t last_number = 0;
    static std::array<Granule, PAGE>* last = nullptr;
    const uintptr_t granule = address / GRANULE, number = granule / PAGE;
    if (!last || last_number != number) {
        auto& page = pages[number];
        if (!page) page = std::make_unique<std::array<Granule, PAGE>>();
        last = page.get();
        last_number = number;
    }
    return (*last)[granule % PAGE];
}

template <typename Visit>
void each_granule(uintptr_t begin, uintptr_t end, Visit visit) {
    for (uintptr_t at = begin / GRANULE * GRANULE; at < end; at += GRANULE) visit(granule_at(at));
}

bool over(const Piece& piece, const Clock& clock) {
    return piece.kind != Kind::ended && piece.lane < clock.size() &&
           clock[piece.lane] >= piece.tick;
}

// A piece of `number` that is not over by `clock`, or NOBODY.
uint32_t unordered(uint32_t number, const Clock& clock) {
    if (!(number & CROWD)) return number == NOBODY || over(pieces[number], clock) ? NOBODY : number;
    const Crowd& crowd = crowds[number & ~CROWD];
    const auto found = std::find_if(crowd.begin(), crowd.end(),
                                    [&](uint32_t one) { return !over(pieces[one], clock); });
    return found == crowd.end() ? NOBODY : *found;
}

// The unfinished readers of a granule, and the current piece.
uint32_t with_reader(uint32_t readers) {
    if (readers == current_piece || unordered(readers, current_lane->clock) == NOBODY)
        return current_piece;
    Crowd crowd = readers & CROWD ? crowds[readers & ~CROWD] : Crowd{readers};
    const auto is_over = [](uint32_t one) { return over(pieces[one], current_lane->clock); };
    crowd.erase(std::remove_if(crowd.begin(), crowd.end(), is_over), crowd.end());
    crowd.push_back(current_piece);
    const auto [at, is_new] =
        numbers_of_crowds.emplace(crowd, CROWD | static_cast<uint32_t>(crowds.size()));
    if (is_new) crowds.push_back(crowd);
    return at->second;
}

std::map<uintptr_t, Region>::iterator region_of(uintptr_t address) {
    auto found = regions.upper_bound(address);
    if (found == regions.begin()) return regions.end();
    --found;
    return address < found->second.end ? found : regions.end();
}

// "4 bytes at 0x7f00 (byte 16 of 1024 of the memory x)"
std::string located(uintptr_t address, size_t bytes) {
    std::string text = std::to_string(bytes) + " bytes at " + hexadecimal(address);
    const auto region = region_of(address);
    if (region == regions.end()) return text;
    const uintptr_t begin = region->first;
    return text + " (byte " + std::to_string(address - begin) + " of " +
           std::to_string(region->second.end - begin) + " of the memory " + region->second.name +
           ")";
}

// The current piece's deed and its fault.
std::string explain(const std::string& done, const Piece& piece, const char* did) {
    if (piece.kind == Kind::ended) return done + ", which ended on " + piece.where;
    const std::string before = piece.kind == Kind::begun ? "begins" : piece.what + did;
    return done + ", which " + before + " on " + piece.where + "; nothing orders the two";
}

// Whether memory of `writer` lies on another device than the current piece.
bool foreign(uint32_t writer, uintptr_t address) {
    const int here = current_lane->device;
    if (writer == NOBODY || here == HOST || pieces[writer].device == here) return false;
    const auto region = region_of(address);
    return region != regions.end() && region->second.device != HOST &&
           region->second.device != here;
}

}  // namespace

void join(Clock& clock, const Clock& other) {
    if (clock.size() < other.size()) clock.resize(other.size());
    for (size_t i = 0; i < other.size(); ++i) clock[i] = std::max(clock[i], other[i]);
}

Lane::Lane(std::string name, int device) : name(std::move(name)), device(device), number(lanes++) {}

Lane& host() {
    static Lane lane("the host", HOST);
    return lane;
}

bool watch(bool on) {
#ifdef LSQ_SANITIZE
    return !on;
#else
    pieces.resize(1);
    crowds.clear();
    numbers_of_crowds.clear();
    for (auto& [number, page] : pages) page->fill({});
    regions.clear();
    watching = on;
    return true;
#endif
}

void begin_piece(Lane& lane, const std::string& what) {
    if (!watching) return;
    current_lane = &lane;
    current_piece = new_piece(Kind::work, lane, what);
}

void end_piece() { current_lane = nullptr; }

std::string use(const void* pointer, size_t bytes, bool writes) {
    if (!watching || !current_lane) return "";
    const uintptr_t begin = reinterpret_cast<uintptr_t>(pointer), end = begin + bytes;
    std::string fault;
    each_granule(begin, end, [&](Granule& granule) {
        const uint32_t writer = unordered(granule.writer, current_lane->clock);
        const uint32_t reader =
            writer || !writes ? NOBODY : unordered(granule.reader, current_lane->clock);
        const bool is_foreign = foreign(granule.writer, begin);
        if (writer || reader || is_foreign) {
            const std::string done = (writes ? "writes " : "reads ") + located(begin, bytes) +
                                     " on " + current_lane->name;
            if (fault.empty()) {
                fault = is_foreign ? done + ", which lies on another device"
                                   : explain(done, pieces[writer ? writer : reader],
                                             writer ? " wrote" : " read");
            }
        } else if (writes) {
            granule = {current_piece, NOBODY};
        } else {
            granule.reader = with_reader(granule.reader);
        }
    });
    return fault;
}

void begin_memory(Lane& lane, const std::string& name, const void* pointer, size_t bytes) {
    if (!watching) return;
    const uintptr_t begin = reinterpret_cast<uintptr_t>(pointer), end = begin + bytes;
    for (auto before = regions.begin(); before != regions.end();) {
        const bool overlaps = before->first < end && begin < before->second.end;
        before = overlaps ? regions.erase(before) : std::next(before);
    }
    const uint32_t piece = new_piece(Kind::begun, lane, "the memory " + name);
    each_granule(begin, end, [piece](Granule& granule) { granule = {piece, NOBODY}; });
    regions[begin] = {name, lane.device, end, false};
}

std::string end_memory(Lane& lane, const std::vector<Lane*>& others, const void* pointer) {
    if (!watching) return "";
    const uintptr_t begin = reinterpret_cast<uintptr_t>(pointer);
    const auto region = regions.find(begin);
    if (region == regions.end() || region->second.ended)
        return "no memory begins at " + hexadecimal(begin);
    Clock clock = lane.clock;
    join(clock, host().clock);
    for (const Lane* other : others) join(clock, other->clock);
    std::string fault;
    const uint32_t piece = new_piece(Kind::ended, lane, "the memory " + region->second.name);
    each_granule(begin, region->second.end, [&](Granule& granule) {
        const uint32_t writer = unordered(granule.writer, clock),
                       reader = unordered(granule.reader, clock);
        if (fault.empty() && (writer || reader)) {
            const Piece& last = pieces[writer ? writer : reader];
            fault = "the memory " + region->second.name + " ends on " + lane.name + ", but " +
                    last.what + " on " + last.where + (writer ? " writes" : " reads") +
                    " it; nothing orders the two";
        }
        granule = {piece, NOBODY};
    });
    region->second.ended = true;
    return fault;
}

}  // namespace emulator
