// What both planners read: one row of int64 per buffer.
#pragma once

#include <cstdint>

namespace lsq {

struct Buffer {
    int64_t size;         // bytes, above 0
    int64_t first, last;  // operations of its life, inclusive
    int64_t alignment;    // bytes, a power of two
    int64_t fixed;        // offset that is given, or -1
};

inline int64_t round_up(int64_t value, int64_t multiple) {
    const int64_t rest = value % multiple;
    return rest ? value + multiple - rest : value;
}

}  // namespace lsq
