// Depth-first search for a plan of a given capacity, with ideas of Moffitt 2023 (MiniMalloc,
// ASPLOS): buffers are placed in order of non-decreasing offset, each as low as it can be; what is
// left must fit over every section of time.
//
// Of all solutions the one with the smallest sum of offsets is looked for, which allows to leave
// out a buffer
//   - above an offset where another one would fit whole below it (it could be moved there);
//   - that could lie lower than the search has come, until a later one lifts it: it would be moved
//     down;
//   - at an offset at which it was tried before, with the same buffers below.
// Where no buffer that is left crosses some time, the parts before and after it are solved apart.
#include <atomic>

#include "planner.h"
#include "rows.h"

using namespace lsq;

namespace {

enum Outcome { kImpossible = 0, kFound = 1, kStopped = 2 };

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
    // Between two neighbouring times at which a life begins or ends, nothing changes: a section.
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

    // Raise what waits for a later buffer below it, then stack all that is left; false where that
    // does not fit.
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
    std::vector<int> rank_;        // position in the preferred order
    std::vector<int64_t> low_;     // lowest offset above all that is placed
    // The same, where it waits for support: above the lowest possible support.
    std::vector<int64_t> raised_;
    std::vector<int64_t> tabu_;    // an offset at which it was tried before
    std::vector<int> begin_, end_;  // sections of its life
    std::vector<std::vector<int>> overlapping_;
    std::vector<int64_t> offsets_;  // -1: not placed
    std::vector<int64_t> stacked_;  // per section, bytes that cannot lie below some offset
    std::vector<int> waiting_, sorted_;
};

}  // namespace

// buffers [n], order [n], at most `budget` positions; control [2]: stop flag (read), positions
// tried (added to). -> offsets [n] where the outcome [1] is kFound.
LSQ_EXPORT void lsq_search_plan(const Buffer* buffers, const int64_t* order, int64_t n,
                                int64_t capacity, int64_t budget, int64_t* control,
                                int64_t* offsets, int64_t* outcome) {
    outcome[0] = Search(buffers, order, n, capacity, budget, control).run(offsets);
}
