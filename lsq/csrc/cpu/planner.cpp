// Best fit (Pisarchyk and Lee 2020, algorithm 3) for buffers in one or several segments;
// lsq/memory/placement.py says what it does and holds the plain version. Every buffer is compared
// with all that lie in the segments: O(n^2) time, O(n) memory.
#include "planner.h"
#include "rows.h"

using namespace lsq;

namespace {

struct Placed {
    int64_t offset, end, first, last;
};

struct Candidate {
    int64_t growth = std::numeric_limits<int64_t>::max();
    int64_t kind = 0;  // 0: a gap, 1: above all neighbours, 2: in an empty segment
    int64_t waste = 0;  // bytes of the gap, or those left above
    int64_t segment = -1;
    int64_t offset = 0;

    bool operator<(const Candidate& other) const {
        if (growth != other.growth) return growth < other.growth;
        if (kind != other.kind) return kind < other.kind;
        // Candidates come by segment and offset: at a tie the first stays.
        return waste < other.waste;
    }
};

class Segment {
public:
    explicit Segment(int64_t limit, int64_t granularity)
        : limit_(limit), granularity_(granularity) {}

    void consider(const Buffer& buffer, int64_t number, Candidate& best) const {
        int64_t start = 0;
        for (const Placed& other : placed_) {
            if (other.first > buffer.last || buffer.first > other.last) continue;
            if (start + buffer.size <= other.offset) {
                const Candidate gap{0, 0, other.offset - start, number, start};
                if (gap < best) best = gap;
            }
            start = std::max(start, round_up(other.end, buffer.alignment));
        }
        const int64_t end = start + buffer.size;
        if (end > limit_) return;
        const int64_t after = capacity(std::max(used_, end));
        const Candidate above{after - capacity(used_), used_ ? 1 : 2, after - end, number, start};
        if (above < best) best = above;
    }

    void put(const Buffer& buffer, int64_t offset) {
        const auto after = [](int64_t value, const Placed& other) { return value < other.offset; };
        placed_.insert(std::upper_bound(placed_.begin(), placed_.end(), offset, after),
                       Placed{offset, offset + buffer.size, buffer.first, buffer.last});
        used_ = std::max(used_, offset + buffer.size);
    }

    bool empty() const { return placed_.empty(); }
    int64_t limit() const { return limit_; }
    int64_t used() const { return used_; }

private:
    int64_t capacity(int64_t used) const { return std::min(limit_, round_up(used, granularity_)); }

    std::vector<Placed> placed_;  // in order of offset
    int64_t limit_, granularity_, used_ = 0;
};

}  // namespace

// buffers [n], order [n], limits [count] -> offsets [n], segments [n] (-1: fits nowhere), used
// [count].
LSQ_EXPORT void lsq_place(const Buffer* buffers, const int64_t* order, int64_t n,
                          const int64_t* limits, int64_t count, int64_t granularity,
                          int64_t* offsets, int64_t* segments, int64_t* used) {
    std::vector<Segment> all;
    for (int64_t s = 0; s < count; ++s) all.emplace_back(limits[s], granularity);
    int64_t opened = 0;  // segments from here on are empty
    for (int64_t step = 0; step < n; ++step) {
        const int64_t i = order[step];
        const Buffer& buffer = buffers[i];
        Candidate best;
        if (buffer.fixed >= 0) {
            if (buffer.fixed + buffer.size <= limits[0]) best = Candidate{0, 0, 0, 0, buffer.fixed};
        } else {
            bool seen_empty = false;
            for (int64_t s = 0; s < count && !(seen_empty && s >= opened); ++s) {
                if (all[s].empty() && (seen_empty || all[s].limit() < buffer.size)) continue;
                seen_empty |= all[s].empty();
                all[s].consider(buffer, s, best);
            }
        }
        segments[i] = best.segment;
        if (best.segment < 0) continue;
        offsets[i] = best.offset;
        all[best.segment].put(buffer, best.offset);
        opened = std::max(opened, best.segment + 1);
    }
    for (int64_t s = 0; s < count; ++s) used[s] = all[s].used();
}
