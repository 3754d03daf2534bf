// Vectors of numbers that begin at a cache line, so that no wide register of them is read from two
// or written to two.
#pragma once

#include <cstddef>
#include <new>
#include <vector>

namespace lsq {

template <class T>
struct AlignedAllocator {
    using value_type = T;
    static constexpr std::align_val_t kLine{64};

    AlignedAllocator() = default;
    template <class Other>
    AlignedAllocator(const AlignedAllocator<Other>&) {}

    T* allocate(std::size_t count) {
        return static_cast<T*>(::operator new(count * sizeof(T), kLine));
    }
    void deallocate(T* data, std::size_t) { ::operator delete(data, kLine); }
    friend bool operator==(const AlignedAllocator&, const AlignedAllocator&) { return true; }
    friend bool operator!=(const AlignedAllocator&, const AlignedAllocator&) { return false; }
};

template <class T>
using Aligned = std::vector<T, AlignedAllocator<T>>;

}  // namespace lsq
