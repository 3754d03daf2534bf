#include "together.h"

#include <algorithm>
#include <map>

namespace ptx {
namespace {

constexpr int kBarriers = 16;  // of a block

template <class Work>
void each_lane(const Warp& warp, uint32_t lanes, const Work& work) {
    for (int lane = 0; lane < kWarp; ++lane)
        if (lanes >> lane & 1) work(*warp.lanes[lane]);
}

// Performs an instruction for which all lanes of `mask` that have not ended wait.
void try_together(Warp& warp, const Instruction& i, uint32_t mask) {
    const uint32_t lanes = mask & warp.live;
    for (int lane = 0; lane < kWarp; ++lane) {
        if (!(lanes >> lane & 1)) continue;
        const Thread& thread = *warp.lanes[lane];
        if (thread.state != State::WAITING || thread.waits != &i || thread.mask != mask) return;
    }
    if (i.aligned && lanes != kAllLanes) {
        each_lane(warp, lanes,
                  [&](Thread& thread) { fault(thread, i, "not all lanes of the warp are there"); });
    }
    i.perform(warp, lanes, i);
    each_lane(warp, lanes,
              [](Thread& thread) { thread.state = State::RUNNING, thread.waits = nullptr; });
}

// A thread comes to a barrier of its block.
Barrier& come(Thread& thread, const Instruction& i) {
    Block& block = *thread.block;
    const auto number = get<int32_t>(thread, i.a);
    if (number < 0 || number >= kBarriers)
        fault(thread, i, "barrier " + std::to_string(number) + "; a block has 0 to 15");
    Barrier& barrier = block.barriers[number];
    const size_t wanted = i.b < 0 ? block.threads.size() : get<uint32_t>(thread, i.b);
    if (i.b >= 0 && (wanted % kWarp || !wanted))
        fault(thread, i, "a barrier of " + std::to_string(wanted) + " threads, not of whole warps");
    if (barrier.arrived && barrier.wanted != wanted)
        fault(thread, i, "another number of threads than others wait for");
    barrier.wanted = wanted;
    const int own = thread.warp->number;
    for (size_t w = 0; w < barrier.last.size(); ++w)
        if (static_cast<int>(w) != own && barrier.last[w] > thread.warp->clock[w])
            fault(thread, i, "warp " + std::to_string(w) +
                                 " came to this barrier before, and nothing orders the two");
    barrier.clock.resize(block.warps.size()), barrier.arrivals.resize(block.warps.size());
    barrier.arrivals[own] = thread.warp->clock[own];
    for (size_t w = 0; w < barrier.clock.size(); ++w)
        barrier.clock[w] = std::max(barrier.clock[w], thread.warp->clock[w]);
    barrier.blocks.join(thread.warp->blocks);
    ++barrier.arrived;
    return barrier;
}

// Lets those who wait at a barrier go on if all have come.
void try_to_pass(Barrier& barrier) {
    if (barrier.arrived < barrier.wanted) return;
    std::map<Warp*, const Instruction*> of_warp;
    for (Thread* other : barrier.waiting) {
        Warp& warp = *other->warp;
        const Instruction*& at = of_warp[&warp];
        if (at && at != other->waits && other->waits->aligned)
            fault(*other, *other->waits, "lanes of a warp wait at different barriers");
        if (!at) {
            at = other->waits;
            for (size_t w = 0; w < barrier.clock.size(); ++w)
                warp.clock[w] = std::max(warp.clock[w], barrier.clock[w]);
            warp.blocks.join(barrier.blocks);
            ++warp.clock[warp.number];
        }
    }
    for (Thread* other : barrier.waiting) other->state = State::RUNNING, other->waits = nullptr;
    Barrier next;
    next.last = std::move(barrier.arrivals);
    barrier = std::move(next);
}

// Value number `v` of a fragment whose values have `bits` bits.
uint32_t value_of(const Thread& thread, const std::vector<int>& slots, int v, int bits) {
    const auto word = static_cast<uint32_t>(thread.r[slots[v * bits / 32]]);
    return word >> v * bits % 32 & static_cast<uint32_t>((1ull << bits) - 1);
}

float bfloat16(uint32_t bits) {
    bits <<= 16;
    float x;
    std::memcpy(&x, &bits, 4);
    return x;
}

// An operand of a product, [rows, k], from the fragments of a warp. CuTe: index = row + rows * k.
template <class T, class Convert>
std::vector<T> gather(const Warp& warp, const std::vector<int> Instruction::* slots,
                      const Instruction& i, const std::vector<int>& layout, int rows, int k,
                      int bits, const Convert& convert) {
    std::vector<T> found(rows * k);
    const int values = static_cast<int>(layout.size()) / kWarp;
    for (int lane = 0; lane < kWarp; ++lane)
        for (int v = 0; v < values; ++v) {
            const int index = layout[lane * values + v];
            found[index % rows * k + index / rows] =
                convert(value_of(*warp.lanes[lane], i.*slots, v, bits));
        }
    return found;
}

// Adds a [m, k] times b [n, k] transposed to the sums.
template <class Sum, class T, class Multiply>
void add_product(Warp& warp, const Instruction& i, const std::vector<T>& a, const std::vector<T>& b,
                 int k, const Multiply& multiply) {
    const std::vector<int>& layout = *i.layouts[2];
    const int values = static_cast<int>(layout.size()) / kWarp;
    for (int lane = 0; lane < kWarp; ++lane)
        for (int v = 0; v < values; ++v) {
            const int index = layout[lane * values + v], row = index % i.m, column = index / i.m;
            Thread& thread = *warp.lanes[lane];
            set<Sum>(thread, i.ds[v],
                     multiply(get<Sum>(thread, i.cs[v]), &a[row * k], &b[column * k], k));
        }
}

int32_t add_integers(int32_t sum, const int32_t* a, const int32_t* b, int k) {
    auto found = static_cast<uint32_t>(sum);  // sums wrap around
    for (int at = 0; at < k; ++at) found += static_cast<uint32_t>(a[at] * b[at]);
    return static_cast<int32_t>(found);
}

int32_t signed_byte(uint32_t bits) { return static_cast<int8_t>(bits); }

// Fields of a descriptor of a matrix in shared memory, as CuTe's GmmaDescriptor has them.
struct Matrix {
    uint64_t start, stride, swizzle;

    Matrix(uint64_t words, const Tables& tables) {
        const auto field = [&](const char* name) {
            const std::vector<int>& place = tables.at(std::string("descriptor ") + name);
            return words >> place[0] & ((1ull << place[1]) - 1);
        };
        start = field("start_address") << 4;
        stride = field("stride_byte_offset") << 4;
        swizzle = field("layout_type");
        if (field("base_offset")) throw Error("a matrix's base offset is not 0");
    }

    // Shared address of byte k of a row: eight rows are a pattern of chunks of 16 bytes, which
    // begins at a multiple of its size.
    uint64_t address(int row, int k, const Tables& tables) const {
        const std::vector<int>& pattern =
            tables.at("wgmma chunks of layout_type " + std::to_string(swizzle));
        const int bytes = static_cast<int>(pattern.size()) * 16;
        const uint64_t plain = start + row / 8 * stride + row % 8 * (bytes / 8) + k;
        const uint64_t first = plain / bytes * bytes;
        return first + pattern[(plain - first) / 16] * 16 + plain % 16;
    }
};

}  // namespace

void with_warp(Thread& thread, const Instruction& i) {
    const uint32_t mask = i.e < 0 ? kAllLanes : get<uint32_t>(thread, i.e);
    if (!(mask >> thread.lane & 1)) fault(thread, i, "the thread's lane is not in the mask");
    thread.state = State::WAITING, thread.waits = &i, thread.mask = mask;
    try_together(*thread.warp, i, mask);
}

void leave(Thread& thread) {
    Warp& warp = *thread.warp;
    warp.live &= ~(1u << thread.lane);
    for (const Thread* other : warp.lanes)
        if (other && other->state == State::WAITING && other->waits->perform)
            try_together(warp, *other->waits, other->mask);
}

void perform_shuffle(Warp& warp, uint32_t lanes, const Instruction& i) {
    uint64_t given[kWarp] = {};
    each_lane(warp, lanes, [&](Thread& thread) { given[thread.lane] = thread.r[i.a]; });
    each_lane(warp, lanes, [&](Thread& thread) {
        const int lane = thread.lane, by = get<int32_t>(thread, i.b) & 31;
        const int clamp = get<int32_t>(thread, i.c) & 31,
                  segment = get<int32_t>(thread, i.c) >> 8 & 31;
        const int last = (lane & segment) | (clamp & ~segment), first = lane & segment;
        int from = lane;
        bool inside = false;
        switch (i.modifier) {
            case Modifier::UP: from = lane - by, inside = from >= last; break;
            case Modifier::DOWN: from = lane + by, inside = from <= last; break;
            case Modifier::BUTTERFLY: from = lane ^ by, inside = from <= last; break;
            default: from = first | (by & ~segment), inside = from <= last;
        }
        if (!inside) from = lane;
        if (!(lanes >> from & 1))
            fault(thread, i, "lane " + std::to_string(from) + " does not take part");
        set<uint32_t>(thread, i.d, static_cast<uint32_t>(given[from]));
        set<uint32_t>(thread, i.predicate, inside);
    });
}

void perform_vote(Warp& warp, uint32_t lanes, const Instruction& i) {
    uint32_t yes = 0;
    each_lane(warp, lanes,
              [&](Thread& thread) { yes |= ((thread.r[i.a] & 1) != i.flag) << thread.lane; });
    const uint32_t found = i.modifier == Modifier::BALLOT ? yes
                           : i.modifier == Modifier::ANY  ? yes != 0
                           : i.modifier == Modifier::ALL  ? yes == lanes
                                                          : yes == lanes || yes == 0;
    each_lane(warp, lanes, [&](Thread& thread) { set<uint32_t>(thread, i.d, found); });
}

void perform_warp_barrier(Warp& warp, uint32_t, const Instruction&) { ++warp.clock[warp.number]; }

void perform_matrix_load(Warp& warp, uint32_t, const Instruction& i) {
    const std::vector<int>& layout = *i.layouts[0];
    const int values = static_cast<int>(layout.size()) / kWarp;
    const uint8_t* rows[kWarp] = {};
    for (int lane = 0; lane < 8 * static_cast<int>(i.ds.size()); ++lane) {
        Thread& thread = *warp.lanes[lane];
        rows[lane] = reach(thread, i, Space::SHARED, thread.r[i.a] + i.number, 16, Access::READ);
    }
    for (int lane = 0; lane < kWarp; ++lane)
        for (int word = 0; word < values / 2; ++word) {
            uint32_t found = 0;
            for (int half = 0; half < 2; ++half) {
                const int from = layout[lane * values + 2 * word + half];
                uint16_t x;
                std::memcpy(&x, rows[from / 8] + from % 8 * 2, 2);
                found |= static_cast<uint32_t>(x) << 16 * half;
            }
            set<uint32_t>(*warp.lanes[lane], i.ds[word], found);
        }
}

void perform_integer_product(Warp& warp, uint32_t, const Instruction& i) {
    const auto convert = [&i](uint32_t x) {
        return i.bits == 8 ? signed_byte(x) : static_cast<int32_t>(x);
    };
    const auto a =
        gather<int32_t>(warp, &Instruction::as, i, *i.layouts[0], i.m, i.k, i.bits, convert);
    const auto b =
        gather<int32_t>(warp, &Instruction::bs, i, *i.layouts[1], i.n, i.k, i.bits, convert);
    add_product<int32_t>(warp, i, a, b, i.k, add_integers);
}

// A sum is rounded once; a GPU cuts off what lies far below the largest product.
void perform_float_product(Warp& warp, uint32_t, const Instruction& i) {
    const auto a = gather<float>(warp, &Instruction::as, i, *i.layouts[0], i.m, i.k, 16, bfloat16);
    const auto b = gather<float>(warp, &Instruction::bs, i, *i.layouts[1], i.n, i.k, 16, bfloat16);
    add_product<float>(warp, i, a, b, i.k, [](float sum, const float* x, const float* y, int k) {
        double found = sum;
        for (int at = 0; at < k; ++at) found += static_cast<double>(x[at]) * y[at];
        return static_cast<float>(found);
    });
}

// a is stored without half of its values, in layouts[0]. The metadata say which two of four
// columns they are: layout "metadata" is (lane, group of four) -> row + m * group.
void perform_sparse_product(Warp& warp, uint32_t, const Instruction& i) {
    const auto stored =
        gather<int32_t>(warp, &Instruction::as, i, *i.layouts[0], i.m, i.k / 2, 8, signed_byte);
    const auto b =
        gather<int32_t>(warp, &Instruction::bs, i, *i.layouts[1], i.n, i.k, 8, signed_byte);
    const std::vector<int>& places = warp.block->kernel.tables->at("mma.sp.m16n8k64.s8 metadata");
    const int groups = static_cast<int>(places.size()) / kWarp;
    std::vector<int32_t> a(i.m * i.k);
    for (int lane = 0; lane < kWarp; ++lane)
        for (int at = 0; at < groups; ++at) {
            const int index = places[lane * groups + at], row = index % i.m, group = index / i.m;
            const uint32_t two = get<uint32_t>(*warp.lanes[lane], i.metadata) >> 4 * at & 15;
            if ((two & 3) >= two >> 2) fault(*warp.lanes[lane], i, "unordered metadata");
            a[row * i.k + 4 * group + (two & 3)] = stored[row * i.k / 2 + 2 * group];
            a[row * i.k + 4 * group + (two >> 2)] = stored[row * i.k / 2 + 2 * group + 1];
        }
    add_product<int32_t>(warp, i, a, b, i.k, add_integers);
}

void perform_warpgroup_fence(Warp& warp, uint32_t lanes, const Instruction&) {
    each_lane(warp, lanes, [](Thread& thread) { thread.fenced = thread.steps; });
}

// Each warp makes its rows of the sums [64, n]: descriptors in slots a and b, slot c: add to them.
void perform_warpgroup_product(Warp& warp, uint32_t, const Instruction& i) {
    const Tables& tables = *warp.block->kernel.tables;
    Thread& first = *warp.lanes[0];
    for (const Thread* thread : warp.lanes)
        if (thread->r[i.a] != first.r[i.a] || thread->r[i.b] != first.r[i.b])
            fault(*thread, i, "its matrices are not those of the other threads");
    if (warp.readings.empty()) warp.readings.resize(1);
    SharedMemory& shared = warp.block->shared;
    const auto load = [&](uint64_t words, int begin, int rows) {
        const Matrix matrix(words, tables);
        std::vector<int32_t> found(rows * i.k);
        for (int row = 0; row < rows; ++row)
            for (int k = 0; k < i.k; ++k) {
                const uint64_t address = matrix.address(begin + row, k, tables);
                found[row * i.k + k] =
                    static_cast<int8_t>(*reach(first, i, Space::SHARED, address, 1, Access::READ));
                const auto offset = static_cast<uint32_t>(address - kSharedFirst);
                if (!shared.touched[offset].proxied)
                    fault(first, i,
                          "shared memory at " + std::to_string(offset) +
                              ": no fence.proxy.async lies between its write and wgmma");
                ++shared.touched[offset].readings;
                warp.readings.back().push_back(offset);
            }
        return found;
    };
    const int top = warp.number % 4 * 16;
    const auto a = load(first.r[i.a], top, 16), b = load(first.r[i.b], 0, i.n);
    const std::vector<int>& layout = *i.layouts[2];
    const int values = static_cast<int>(layout.size()) / kWarpgroup;
    for (Thread* thread : warp.lanes) {
        if (thread->flying.empty()) thread->flying.resize(1);
        for (int v = 0; v < values; ++v) {
            const int slot = i.ds[v];
            uint32_t& written = thread->written[slot];
            const bool add = thread->r[i.c] & 1;
            if (add && written == kUnset) fault(*thread, i, "nothing has written its sums");
            if (written != kInFlight && written >= thread->fenced)
                fault(*thread, i, "no wgmma.fence lies between a write of its sums and wgmma");
            const int index = layout[thread->number % kWarpgroup * values + v];
            const int row = index % i.m - top, column = index / i.m;
            if (row < 0 || row >= 16) throw Error("a layout of wgmma gives a warp other rows");
            const int32_t before = add ? get<int32_t>(*thread, slot) : 0;
            set(*thread, slot, add_integers(before, &a[row * i.k], &b[column * i.k], i.k));
            thread->flights += written != kInFlight;
            written = kInFlight;
            thread->flying.back().push_back(slot);
        }
    }
    ++warp.products;
}

void perform_warpgroup_commit(Warp& warp, uint32_t lanes, const Instruction&) {
    if (warp.readings.empty()) warp.readings.resize(1);
    warp.readings.emplace_back();
    each_lane(warp, lanes, [](Thread& thread) {
        if (thread.flying.empty()) thread.flying.resize(1);
        thread.flying.emplace_back();
    });
}

void perform_warpgroup_wait(Warp& warp, uint32_t lanes, const Instruction& i) {
    SharedMemory& shared = warp.block->shared;
    const size_t left = i.number + 1;  // with the group that is not committed
    while (warp.readings.size() > left) {
        for (const uint32_t offset : warp.readings.front()) {
            --shared.touched[offset].readings;
            shared.read[offset * warp.clock.size() + warp.number] =
                warp.clock[warp.number] << 8 | SharedMemory::kSeveral;
        }
        warp.readings.erase(warp.readings.begin());
    }
    each_lane(warp, lanes, [&](Thread& thread) {
        std::vector<int> done;
        while (thread.flying.size() > left) {
            done.insert(done.end(), thread.flying.front().begin(), thread.flying.front().end());
            thread.flying.erase(thread.flying.begin());
        }
        for (const int slot : done) {
            const auto flies = [slot](const std::vector<int>& group) {
                return std::find(group.begin(), group.end(), slot) != group.end();
            };
            if (thread.written[slot] != kInFlight ||
                std::any_of(thread.flying.begin(), thread.flying.end(), flies))
                continue;
            thread.written[slot] = 1;
            --thread.flights;
        }
    });
}

void with_block(Thread& thread, const Instruction& i) {
    Barrier& barrier = come(thread, i);
    if (i.flag) {
        ++thread.warp->clock[thread.warp->number];
    } else {
        thread.state = State::WAITING, thread.waits = &i;
        barrier.waiting.push_back(&thread);
    }
    try_to_pass(barrier);
}

void perform_arrival(Warp& warp, uint32_t lanes, const Instruction& i) {
    each_lane(warp, lanes, [&](Thread& thread) { try_to_pass(come(thread, i)); });
    ++warp.clock[warp.number];
}

void fence_proxy(Thread& thread, const Instruction&) {
    const uint32_t now = thread.warp->clock[thread.warp->number];
    for (const auto& [first, last] : thread.unfenced)
        for (uint32_t byte = first; byte < last; ++byte) {
            Touched& one = thread.block->shared.touched[byte];
            if (one.writer == thread.number) one.proxied = true, one.written_at = now;
        }
    thread.unfenced.clear();
}

}  // namespace ptx
