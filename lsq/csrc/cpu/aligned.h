// Memory that begins at a cache line, so that no wide register is read from two lines.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
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

// Grows, and is not cleared. A thread keeps its own from product to product: the system clears
// pages of fresh memory.
template <class T>
class Kept {
public:
    T* get() const { return data_.get(); }
    T* at_least(int64_t count) {
        if (count > count_) {
            data_.reset();
            data_.reset(AlignedAllocator<T>().allocate(count));
            count_ = count;
        }
        return get();
    }

private:
    struct Free {
        void operator()(T* data) const { AlignedAllocator<T>().deallocate(data, 0); }
    };
    std::unique_ptr<T, Free> data_;
    int64_t count_ = 0;
};

struct AlignedFloats : Kept<float> {
    explicit AlignedFloats(int64_t n) { at_least(n); }
};

}  // namespace lsq
