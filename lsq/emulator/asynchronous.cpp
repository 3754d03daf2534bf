// A GPU may do asynchronous work at any time until the wait for it. Here a copy reads its source at
// the begin and writes at the wait, so that early readers see old data. A multiplication reads and
// writes at the wait; its sums are rubbish until then. races.cpp reports accesses to a copy's
// destination and writes to a multiplication's operands meanwhile.
//
// A thread multiplies what its own sums need. Layouts are those of "Asynchronous Warpgroup Level
// Matrix Instructions" in NVIDIA's PTX ISA, with group = lane / 4, part = lane % 4.
#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <deque>
#include <vector>

#include "races.h"
#include "report.h"
#include "threads.h"

namespace emulator {

namespace {

struct Copy {
    unsigned char* to;
    size_t size;
    unsigned char bytes[16];
};

using Group = std::vector<Copy>;

struct Copies {
    Group open;                   // belong to no group yet
    std::deque<Group> under_way;  // the oldest first
};

Copies copies[1024];  // of the threads

constexpr unsigned WARPGROUP = 128, INNER = 32, CHUNK = 16;
constexpr int32_t RUBBISH = INT32_MIN + 0x5a5a5a;

using Row = std::array<int8_t, INNER>;

// Rows of 32 values in shared memory, by a descriptor; "K-major".
struct Matrix {
    uint64_t start, eight_rows;  // addresses and bytes
    unsigned swizzle;            // bytes of a row of the pattern: 32, 64 or 128

    explicit Matrix(uint64_t descriptor)
        : start((descriptor & 0x3fff) * 16), eight_rows((descriptor >> 32 & 0x3fff) * 16),
          swizzle((descriptor >> 62) ? 256u >> (descriptor >> 62) : 0) {}

    // The bits of an address from 16 on are exchanged by those from 128 on.
    const unsigned char* chunk(unsigned row, unsigned number) const {
        const uint64_t at = start + row / 8 * eight_rows + row % 8 * swizzle + number * CHUNK;
        const uint64_t bits = swizzle / CHUNK - 1;
        return emulator_dynamic_shared + (at ^ (at >> 7 & bits) << 4);
    }

    Row row(unsigned number) const {
        Row values;
        for (unsigned i = 0; i < INNER / CHUNK; ++i)
            std::memcpy(values.data() + i * CHUNK, chunk(number, i), CHUNK);
        return values;
    }
};

struct Multiplication {
    Matrix a, b;
    int32_t* sums;  // [columns / 8, 4]
    unsigned columns;
};

struct Sums {
    int32_t* registers;
    std::vector<int32_t> values;
    unsigned uses;  // multiplications under way
};

struct Multiplications {
    std::vector<Multiplication> open;  // belong to no group yet
    std::deque<std::vector<Multiplication>> under_way;
    std::vector<Sums> sums;
    bool fenced = false;
    uint64_t history = 0;  // of all that was begun, as a number
};

Multiplications multiplications[1024];  // of the threads

// Lanes only meet.
void nothing(void* const*) {}

unsigned first_row() { return current % WARPGROUP / WARP * 16 + current % WARP / 4; }

unsigned column_of(unsigned number) { return number / 2 * 8 + current % 4 * 2 + number % 2; }

// Calls work(address) for each operand chunk of this thread's sums.
template <class Work>
void for_chunks(const Multiplication& product, const Work& work) {
    for (unsigned i = 0; i < INNER / CHUNK; ++i) {
        for (unsigned half = 0; half < 2; ++half) work(product.a.chunk(first_row() + 8 * half, i));
        for (unsigned number = 0; number < product.columns / 4; ++number)
            work(product.b.chunk(column_of(number), i));
    }
}

void multiply(const Multiplication& product, std::vector<int32_t>& sums) {
    const Row rows[2] = {product.a.row(first_row()), product.a.row(first_row() + 8)};
    for (unsigned number = 0; number < product.columns / 4; ++number) {
        const Row column = product.b.row(column_of(number));
        for (unsigned half = 0; half < 2; ++half) {
            int32_t sum = 0;
            for (unsigned k = 0; k < INNER; ++k) sum += rows[half][k] * column[k];
            int32_t& total = sums[number / 2 * 4 + half * 2 + number % 2];
            // Wraps around.
            total = static_cast<int32_t>(static_cast<uint32_t>(total) + static_cast<uint32_t>(sum));
        }
    }
}

void finish(Multiplications& mine, const Multiplication& product) {
    const auto of_it = [&product](const Sums& sums) { return sums.registers == product.sums; };
    const auto sums = std::find_if(mine.sums.begin(), mine.sums.end(), of_it);
    multiply(product, sums->values);
    for_chunks(product, [](const unsigned char* chunk) { end_reading(chunk, CHUNK); });
    if (--sums->uses) return;
    std::copy(sums->values.begin(), sums->values.end(), sums->registers);
    mine.sums.erase(sums);
}

void check_matrix(uint64_t descriptor, const Matrix& matrix, unsigned rows, Site site) {
    const std::string given =
        "gives the descriptor " + hexadecimal(descriptor) + " to wgmma (" + describe(site) + "), ";
    if (!matrix.swizzle)
        fail_thread(given + "whose matrix is not swizzled; the emulator knows swizzled ones alone");
    if (descriptor >> 49 & 7 || matrix.eight_rows % (8 * matrix.swizzle)) {
        fail_thread(given + "whose groups of eight rows do not lie at a multiple of " +
                    std::to_string(8 * matrix.swizzle));
    }
    if (matrix.start % matrix.swizzle + INNER > matrix.swizzle ||
        matrix.start / matrix.swizzle % 8) {
        fail_thread(given +
                    "whose rows of 32 values do not begin within the first row of its swizzle");
    }
    const unsigned char* first =
        emulator_dynamic_shared + matrix.start - matrix.start % matrix.swizzle;
    const unsigned char* past = first + (rows / 8 - 1) * matrix.eight_rows + 8 * matrix.swizzle;
    emulator_check_shared(past - 1, 1, "wgmma", site);
}

}  // namespace

void abandon_asynchronous() {
    for (Copies& mine : copies) {
        mine.under_way.push_back(std::move(mine.open));
        for (const Group& group : mine.under_way) {
            for (const Copy& copy : group) end_copy(copy.to, copy.size);
        }
        mine = {};
    }
    for (Multiplications& mine : multiplications) mine = {};
    end_readers();
}

std::string different_multiplications() {
    for (unsigned i = 0; i < threads.size(); ++i) {
        if (multiplications[i].history == multiplications[i / WARPGROUP * WARPGROUP].history)
            continue;
        return "the warps of its warpgroup " + std::to_string(i / WARPGROUP) +
               " do not begin the same wgmma";
    }
    return "";
}

}  // namespace emulator

using namespace emulator;

extern "C" {

void emulator_copy(void* to, const void* from, size_t size, bool zeros, const void* instruction,
                   Site site) {
    for (const void* address : {static_cast<const void*>(to), from}) {
        if (reinterpret_cast<uintptr_t>(address) % size) emulator_misaligned(address, size, site);
    }
    emulator_check_shared(to, size, "cp.async", site);
    if (!zeros) emulator_read(from, size, instruction);
    // An access of its own for those who count.
    begin_copy(to, size, static_cast<const char*>(instruction) + 1);
    Copy copy = {static_cast<unsigned char*>(to), size, {}};
    if (!zeros) std::memcpy(copy.bytes, from, size);
    copies[current].open.push_back(copy);
}

void emulator_commit_copies() {
    Copies& mine = copies[current];
    mine.under_way.push_back(std::move(mine.open));
    mine.open.clear();
}

void emulator_wait_copies(size_t groups) {
    Copies& mine = copies[current];
    for (; mine.under_way.size() > groups; mine.under_way.pop_front()) {
        for (const Copy& copy : mine.under_way.front()) {
            std::memcpy(copy.to, copy.bytes, copy.size);
            end_copy(copy.to, copy.size);
        }
    }
}

uint32_t emulator_shared_address(const void* address) {
    return static_cast<uint32_t>(static_cast<const unsigned char*>(address) -
                                 emulator_dynamic_shared);
}

void emulator_fence_warpgroup(Site site) {
    emulator_together("wgmma.fence", nothing, nullptr, site);
    multiplications[current].fenced = true;
}

void emulator_begin_multiplication(int32_t* registers, uint32_t columns, uint64_t a, uint64_t b,
                                   Site site) {
    emulator_together("wgmma.mma_async", nothing, nullptr, site);
    Multiplications& mine = multiplications[current];
    if (!mine.fenced) {
        fail_thread("begins wgmma (" + describe(site) +
                    ") with no wgmma.fence behind what may have touched its sums");
    }
    const Multiplication product = {Matrix(a), Matrix(b), registers, columns};
    check_matrix(a, product.a, 64, site);
    check_matrix(b, product.b, columns, site);
    const auto of_it = [registers](const Sums& sums) { return sums.registers == registers; };
    auto sums = std::find_if(mine.sums.begin(), mine.sums.end(), of_it);
    if (sums == mine.sums.end()) {
        mine.sums.push_back(
            {registers, std::vector<int32_t>(registers, registers + columns / 2), 0});
        sums = mine.sums.end() - 1;
        std::fill_n(registers, columns / 2, RUBBISH);
    }
    ++sums->uses;
    for_chunks(product, [](const unsigned char* chunk) { begin_reading(chunk, CHUNK); });
    mine.open.push_back(product);
    for (const uint64_t part : {a - product.a.start / 16, b, uint64_t{columns}}) {
        mine.history = mine.history * 1000003 + part + 1;
    }
}

void emulator_commit_multiplications(Site site) {
    emulator_together("wgmma.commit_group", nothing, nullptr, site);
    Multiplications& mine = multiplications[current];
    mine.under_way.push_back(std::move(mine.open));
    mine.open.clear();
}

void emulator_wait_multiplications(size_t groups, Site site) {
    emulator_together("wgmma.wait_group", nothing, nullptr, site);
    Multiplications& mine = multiplications[current];
    for (; mine.under_way.size() > groups; mine.under_way.pop_front()) {
        for (const Multiplication& product : mine.under_way.front()) finish(mine, product);
    }
    if (mine.sums.empty()) mine.fenced = false;
}

}  // extern "C"
