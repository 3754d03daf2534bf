// A launch in progress: threads, warps, blocks, and instructions as they run.
//
// Threads run one after another, each until it ends or comes to an instruction that it does with
// others (together.cpp). The last thread to come performs it for all.
#pragma once

#include <cstring>
#include <memory>

#include "memory.h"
#include "text.h"

namespace ptx {

constexpr int kWarp = 32, kWarpgroup = 128;
constexpr uint32_t kAllLanes = 0xffffffffu;

struct Block;
struct Instruction;
struct Thread;
struct Warp;
using Run = void (*)(Thread&, const Instruction&);
using Perform = void (*)(Warp&, uint32_t lanes, const Instruction&);

enum class Modifier {
    NONE,
    UP,
    DOWN,
    BUTTERFLY,
    INDEX,
    ANY,
    ALL,
    BALLOT,
    UNIFORM,
    ADD,
    MIN,
    MAX,
    AND,
    OR,
    XOR,
    EXCHANGE,
    COMPARE_AND_SWAP
};

struct Instruction {
    Run run = nullptr;
    int guard = -1;
    bool negated = false;
    int d = -1, a = -1, b = -1, c = -1, e = -1;  // slots: result and operands
    int metadata = -1;                           // of a sparse product
    int predicate = -1;                          // second result
    std::vector<int> ds, as, bs, cs;             // slots of vectors: of the result, of operands
    Space space = Space::GENERIC;
    uint64_t number = 0;  // offset of an address, target of a branch, or as the instruction says
    int bits = 0;         // of the result's register
    int bytes = 0;        // of each value in memory
    int rounding = 0;     // as fesetround takes it
    bool flag = false;    // as the instruction says
    Modifier modifier = Modifier::NONE;
    Perform perform = nullptr;
    bool copies = false;   // mov, selp: may copy a register that nothing has written
    bool aligned = false;  // all lanes of a warp must do it together
    // Layouts of the operands and the result of a product, of the words of a matrix load.
    const std::vector<int>* layouts[3] = {};
    int m = 0, n = 0, k = 0;
    std::vector<int> reads, writes;
    const Statement* statement = nullptr;
};

// CuTe's layouts by name: tests/ptx/layouts.py says what the numbers are.
using Tables = std::map<std::string, std::vector<int>>;

struct Kernel {
    std::string name;
    const KernelText* text;
    std::vector<Instruction> code;
    std::vector<uint64_t> constants;  // behind the registers
    int slots = 0;
    uint64_t parameter_bytes = 0, local_bytes = 0;
    uint64_t shared_bytes = 0;  // static
    uint64_t dynamic_align = 1;
    int dynamic_constant = -1;  // the constant that is the address of dynamic shared memory
    std::vector<uint64_t> parameter_offsets;
    const Tables* tables;
    bool fences = false;  // has fence.proxy
};

enum class State { RUNNING, WAITING, EXITED };

// A copy that cp.async has begun.
struct Copy {
    uint32_t to;
    const uint8_t* from;
    uint32_t bytes, wanted;
};

struct Thread {
    Block* block;
    Warp* warp;
    int number, lane;
    State state = State::RUNNING;
    size_t at = 0;                       // the next instruction
    const Instruction* waits = nullptr;  // WAITING: for others to come here
    uint32_t mask = 0;                   // of the lanes that it waits for
    uint32_t steps = 1;
    std::vector<uint64_t> r;
    std::vector<uint32_t> written;          // by slot: the step, kUnset or kInFlight
    uint32_t flights = 0;                   // registers that wgmma still writes
    uint32_t fenced = 0;                    // step of the last wgmma.fence
    std::vector<Copy> copies;               // since the last commit_group
    std::vector<std::vector<Copy>> groups;  // of cp.async
    std::vector<std::vector<int>> flying;   // slots, by group of wgmma, as Warp::readings
    std::vector<std::pair<uint32_t, uint32_t>> unfenced;  // writes since the last proxy fence
    std::vector<uint8_t> local;
};
constexpr uint32_t kUnset = 0, kInFlight = UINT32_MAX;

// Shared memory that a group of multiplications still reads.
using Reading = std::vector<uint32_t>;

struct Warp {
    Block* block;
    int number;
    Thread* lanes[kWarp] = {};    // nullptr beyond the block
    uint32_t live = 0;            // lanes that have not ended
    std::vector<uint32_t> clock;  // of each warp, as far as this one has synchronised with it
    SeenOfBlocks blocks;
    std::vector<Reading> readings;  // by group; the last one is not committed
    int products = 0;               // by wgmma
};

struct Barrier {
    std::vector<Thread*> waiting;
    size_t arrived = 0, wanted = 0;
    std::vector<uint32_t> clock;           // of those that have arrived
    std::vector<uint32_t> arrivals, last;  // by warp: its own clock when it came, 0 for none; last
                                           // time the barrier let them go
    SeenOfBlocks blocks;
};

struct Launch {
    const Kernel* kernel;
    uint32_t grid[3], block[3];
    uint64_t dynamic_bytes;
    const uint8_t* parameters;
    const Allocations* allocations;
    GlobalMemory* memory;
    int order;
};

struct Block {
    const Launch& launch;
    const Kernel& kernel;
    int number;
    uint32_t index[3];
    std::vector<Thread> threads;
    std::vector<Warp> warps;
    std::map<int, Barrier> barriers;
    SharedMemory shared;

    Block(const Launch& launch, int number);
    void run();

private:
    void deadlock() const;
};

// What is wrong where: ends the launch.
[[noreturn]] void fault(const Thread& thread, const Instruction& at, const std::string& what);

std::unique_ptr<Kernel> decode(const KernelText& text, const std::vector<Variable>& of_module,
                               const std::map<std::string, uint64_t>& globals,
                               const Tables& tables);

// memory.cpp
// The place of `bytes` bytes at an address, which the thread may read or write. `value`: what it
// writes; threads may write the same one at the same time.
enum class Access { READ, WRITE, UPDATE };
uint8_t* reach(Thread& thread, const Instruction& at, Space space, uint64_t address, int bytes,
               Access access, const void* value = nullptr);
// cp.async: its source is read, it begins, the thread has waited for it.
void check_global_read(Thread& thread, const Instruction& at, uint64_t address, int bytes);
void begin(Thread& thread, const Instruction& at, Copy copy);
void complete(Thread& thread, const Instruction& at, const std::vector<Copy>& copies);
// membar.gl: what the thread has seen goes with its next atomic operation, and the other way round.
void fence_memory(Thread& thread, const Instruction& at);

// together.cpp
void leave(Thread& thread);  // after its end

template <class T>
T get(const Thread& thread, int slot) {
    T value;
    std::memcpy(&value, &thread.r[slot], sizeof value);
    return value;
}
template <class T>
void set(Thread& thread, int slot, T value) {
    if (slot < 0) return;  // "_"
    uint64_t word = 0;
    std::memcpy(&word, &value, sizeof value);
    thread.r[slot] = word;
}

}  // namespace ptx
