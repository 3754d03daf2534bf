// Plans of memory: best fit (Pisarchyk and Lee 2020, algorithm 3), whose plain version is
// `reference` in lsq/memory/buffers.py, and the search of lsq/memory/exact.py.
#include <atomic>

#include "rows.h"

using namespace lsq;

namespace {

struct Buffer {
    int64_t size;         // bytes, above 0
    int64_t first, last;  // operations of its life, inclusive
    int64_t alignment;    // bytes, a power of two
    int64_t fixed;        // given offset, or -1
};

struct Placed {
    int64_t offset, end, first, last;
};

int64_t round_up(int64_t value, int64_t multiple) {
    const int64_t rest = value % multiple;
    return rest ? value + multiple - rest : value;
}

// The smallest gap between the buffers that are alive with this one, else the offset above them.
int64_t best_fit(const Buffer& buffer, const std::vector<Placed>& by_offset) {
    int64_t start = 0, best = -1, smallest = std::numeric_limits<int64_t>::max();
    for (const Placed& other : by_offset) {
        if (other.first > buffer.last || buffer.first > other.last) continue;
        const int64_t gap = other.offset - start;
        if (gap >= buffer.size && gap < smallest) best = start, smallest = gap;
        start = std::max(start, round_up(other.end, buffer.alignment));
    }
    return best < 0 ? start : best;
}

enum Outcome { kImpossible = 0, kFound = 1, kStopped = 2 };

// Depth-first search for a plan of a given capacity, after Moffitt 2023 (MiniMalloc, ASPLOS):
// buffers are placed in order of non-decreasing offset, each as low as possible; the rest must fit
// over every section of time.
//
// It looks for the solution with the smallest sum of offsets, and so leaves out a buffer above an
// offset where another would fit whole below it; one that could lie lower, until a later one lifts
// it; and an offset at which it was tried with the same buffers below. Where no buffer crosses some
// time, the parts before and after it are solved apart.
class Search {
public:
    Search(const Buffer* buffers, const int64_t* order, int64_t n, int64_t capacity, int64_t budget,
           int64_t* control)
        : buffers_(buffers), n_(n), capacity_(capacity), budget_(budget), control_(control),
          rank_(n), low_(n, 0), raised_(n), tabu_(n, -1), begin_(n), end_(n), overlapping_(n),
          offsets_(n, -1) {
        for (int64_t i = 0; i < n; ++i) rank_[order[i]] = static_cast<int>(i);
        make_sections();
        for (int64_t i = 0; i < n; ++i) {
            for (int64_t j = 0; j < n; ++j) {
                if (i != j && begin_[i] < end_[j] && begin_[j] < end_[i])
                    overlapping_[i].push_back(static_cast<int>(j));
            }
        }
    }

    Outcome run(int64_t* offsets) {
        std::vector<int> movable;
        for (int i = 0; i < n_; ++i) {
            if (buffers_[i].fixed >= 0) {
                offsets_[i] = buffers_[i].fixed;
            } else {
                movable.push_back(i);
            }
        }
        for (int i : movable) low_[i] = lifted(i, 0);
        const Outcome outcome = split(movable, 0);
        if (outcome == kFound) std::copy(offsets_.begin(), offsets_.end(), offsets);
        return outcome;
    }

private:
    // A section lies between two neighbouring times at which a life begins or ends.
    void make_sections() {
        std::vector<int64_t> times;
        for (int64_t i = 0; i < n_; ++i) {
            times.push_back(buffers_[i].first);
            times.push_back(buffers_[i].last + 1);
        }
        std::sort(times.begin(), times.end());
        times.erase(std::unique(times.begin(), times.end()), times.end());
        const auto index = [&](int64_t time) {
            return static_cast<int>(std::lower_bound(times.begin(), times.end(), time) -
                                    times.begin());
        };
        stacked_.resize(times.size());
        for (int64_t i = 0; i < n_; ++i) {
            begin_[i] = index(buffers_[i].first);
            end_[i] = index(buffers_[i].last + 1);
        }
    }

    // The lowest aligned offset from `offset` on that no fixed buffer occupies.
    int64_t lifted(int i, int64_t offset) const {
        const Buffer& buffer = buffers_[i];
        offset = round_up(offset, buffer.alignment);
        for (bool again = true; again;) {
            again = false;
            for (int j : overlapping_[i]) {
                const Buffer& other = buffers_[j];
                if (other.fixed >= 0 && other.fixed < offset + buffer.size &&
                    offset < other.fixed + other.size) {
                    offset = round_up(other.fixed + other.size, buffer.alignment);
                    again = true;
                }
            }
        }
        return offset;
    }

    // Solve the parts of `members` that share no time one after the other, small ones first.
    Outcome split(std::vector<int>& members, int64_t current) {
        std::sort(members.begin(), members.end(),
                  [&](int a, int b) { return begin_[a] < begin_[b]; });
        std::vector<std::vector<int>> parts;
        int reach = -1;
        for (int i : members) {
            if (begin_[i] >= reach) parts.emplace_back();
            parts.back().push_back(i);
            reach = std::max(reach, end_[i]);
        }
        members.clear();
        std::stable_sort(parts.begin(), parts.end(),
                         [](const auto& a, const auto& b) { return a.size() < b.size(); });
        std::vector<std::pair<int, int64_t>> placed;  // and their lowest offsets before
        for (const auto& part : parts) {
            const size_t solved = placed.size();
            for (int i : part) placed.emplace_back(i, low_[i]);
            const Outcome outcome = solve(part, current);
            if (outcome == kFound) continue;
            placed.resize(solved);
            for (auto [i, before] : placed) {
                offsets_[i] = -1;
                low_[i] = before;
            }
            return outcome;
        }
        return kFound;
    }

    bool waits(int i, int64_t current) const { return low_[i] < current || tabu_[i] == low_[i]; }

    // Raises buffers that wait for support, then stacks the rest; false if that does not fit.
    bool possible(const std::vector<int>& members, int64_t current) {
        int first = begin_[members[0]], last = 0;
        waiting_.clear();
        for (int i : members) {
            first = std::min(first, begin_[i]);
            last = std::max(last, end_[i]);
            raised_[i] = std::max(current, low_[i]);
            if (waits(i, current)) waiting_.push_back(i);
        }
        for (bool again = true; again;) {
            again = false;
            for (int i : waiting_) {
                int64_t support = capacity_ + 1;
                for (int j : overlapping_[i]) {
                    if (offsets_[j] < 0) support = std::min(support, raised_[j] + buffers_[j].size);
                }
                support = round_up(support, buffers_[i].alignment);
                if (support + buffers_[i].size > capacity_) return false;
                again |= support > raised_[i];
                raised_[i] = std::max(raised_[i], support);
            }
        }
        sorted_ = members;
        std::sort(sorted_.begin(), sorted_.end(),
                  [&](int a, int b) { return raised_[a] > raised_[b]; });
        // In every section, all that cannot lie below some offset must fit above it.
        std::fill(stacked_.begin() + first, stacked_.begin() + last, 0);
        for (int i : sorted_) {
            const int64_t size = buffers_[i].size;
            int64_t most = 0;
            int64_t* stacked = stacked_.data();
            for (int s = begin_[i]; s < end_[i]; ++s) {
                stacked[s] += size;
                most = std::max(most, stacked[s]);
            }
            if (raised_[i] + most > capacity_) return false;
        }
        return true;
    }

    bool stopped() {
        if (++nodes_ % 256 == 0) {
            reinterpret_cast<std::atomic<int64_t>*>(control_ + 1)->fetch_add(256);
            if (reinterpret_cast<std::atomic<int64_t>*>(control_)->load()) return true;
        }
        return nodes_ > budget_;
    }

    // Place all `members`, which are connected in time, at `current` or above.
    Outcome solve(const std::vector<int>& members, int64_t current) {
        if (stopped()) return kStopped;
        if (!possible(members, current)) return kImpossible;
        int64_t ceiling = capacity_ + 1;
        for (int i : members) ceiling = std::min(ceiling, low_[i] + buffers_[i].size);
        std::vector<int> choices;
        for (int i : members) {
            if (!waits(i, current) && low_[i] < ceiling) choices.push_back(i);
        }
        std::sort(choices.begin(), choices.end(), [&](int a, int b) {
            return low_[a] != low_[b] ? low_[a] < low_[b] : rank_[a] < rank_[b];
        });
        std::vector<std::pair<int, int64_t>> forbidden;
        Outcome outcome = kImpossible;
        for (int i : choices) {
            outcome = put(members, i);
            if (outcome != kImpossible) break;
            forbidden.emplace_back(i, tabu_[i]);
            tabu_[i] = low_[i];
        }
        for (auto [i, before] : forbidden) tabu_[i] = before;
        return outcome;
    }

    Outcome put(const std::vector<int>& members, int i) {
        const int64_t offset = low_[i], end = offset + buffers_[i].size;
        offsets_[i] = offset;
        std::vector<std::pair<int, int64_t>> changed;
        for (int j : overlapping_[i]) {
            if (offsets_[j] < 0 && low_[j] < end) {
                changed.emplace_back(j, low_[j]);
                low_[j] = lifted(j, end);
            }
        }
        std::vector<int> rest;
        for (int j : members) {
            if (j != i) rest.push_back(j);
        }
        const Outcome outcome = split(rest, offset);
        if (outcome == kFound) return outcome;
        for (auto [j, before] : changed) low_[j] = before;
        offsets_[i] = -1;
        return outcome;
    }

    const Buffer* buffers_;
    const int64_t n_, capacity_, budget_;
    int64_t* control_;
    int64_t nodes_ = 0;
    std::vector<int> rank_;     // position in the preferred order
    std::vector<int64_t> low_;  // lowest offset above all that is placed
    // low_, or for waiting buffers the lowest possible support.
    std::vector<int64_t> raised_;
    std::vector<int64_t> tabu_;     // an offset at which it was tried before
    std::vector<int> begin_, end_;  // sections of its life
    std::vector<std::vector<int>> overlapping_;
    std::vector<int64_t> offsets_;  // -1: not placed
    std::vector<int64_t> stacked_;  // per section, bytes that cannot lie below some offset
    std::vector<int> waiting_, sorted_;
};

}  // namespace

// buffers [n], order [n] -> offsets [n]. O(n^2) time.
LSQ_EXPORT void lsq_best_fit(const Buffer* buffers, const int64_t* order, int64_t n,
                             int64_t* offsets) {
    std::vector<Placed> by_offset;
    for (int64_t step = 0; step < n; ++step) {
        const Buffer& buffer = buffers[order[step]];
        const int64_t offset = buffer.fixed >= 0 ? buffer.fixed : best_fit(buffer, by_offset);
        offsets[order[step]] = offset;
        const auto after = [](int64_t value, const Placed& other) { return value < other.offset; };
        by_offset.insert(std::upper_bound(by_offset.begin(), by_offset.end(), offset, after),
                         Placed{offset, offset + buffer.size, buffer.first, buffer.last});
    }
}

// buffers [n], order [n], at most `budget` positions; control [2]: stop flag (read), positions
// tried (added to). -> offsets [n] where the outcome [1] is kFound.
LSQ_EXPORT void lsq_search_plan(const Buffer* buffers, const int64_t* order, int64_t n,
                                int64_t capacity, int64_t budget, int64_t* control,
                                int64_t* offsets, int64_t* outcome) {
    outcome[0] = Search(buffers, order, n, capacity, budget, control).run(offsets);
}
