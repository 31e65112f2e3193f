// Asynchronous reads from other GPUs' memory. A load takes about 1 us, so a thread that waited for each value
// before requesting the next would leave the links idle.
//
// The copies are cp.async, from global to shared memory, 4, 8 or 16 aligned bytes each. A thread's copies
// complete in groups, in the order in which they began.
#pragma once

#include <cstdint>

#include "kernels/cuda/vector.cuh"

namespace gradwire::cuda {

template <int kBytes>
__device__ __forceinline__ void begin_copy(void* to_shared, const void* from_global) {
  static_assert(kBytes == 4 || kBytes == 8 || kBytes == 16);
#ifdef GRADWIRE_SIMT
  simt::begin_copy(to_shared, from_global, kBytes);
#else
  const auto to = static_cast<uint32_t>(__cvta_generic_to_shared(to_shared));
  const auto from = __cvta_generic_to_global(from_global);
  if constexpr (kBytes == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(to), "l"(from), "n"(kBytes) : "memory");
  }
#endif
}

// Ends the group of copies begun since the last call; a group may be empty.
__device__ __forceinline__ void end_group() {
#ifdef GRADWIRE_SIMT
  simt::end_group();
#else
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Blocks until all copy groups of this thread except the last kGroups have arrived.
template <int kGroups>
__device__ __forceinline__ void wait_for_groups() {
#ifdef GRADWIRE_SIMT
  simt::wait_for_groups(kGroups);
#else
  asm volatile("cp.async.wait_group %0;" ::"n"(kGroups) : "memory");
#endif
}

// One thread's slots in shared memory, 16 bytes each. The slots of a warp's threads are adjacent.
struct Pieces {
  unsigned char* first;
  __device__ __forceinline__ unsigned char* at(int k) const { return first + k * 16 * kVectorThreads; }
};

// The reads of a thread for the vectors first, first + stride, ... of a loop, in order: Reads::kSlots - 1
// items are in flight while the thread uses another item. Each thread copies and uses only the slots of this
// thread, so no barrier is needed.
//   struct Reads {
//     static constexpr int kSlots, kPieces;  // per item
//     int items() const;                     // per vector
//     void begin(const Pieces& to, int item, int64_t vector) const;  // by begin_copy()
//   };
template <typename Reads>
class ReadAhead {
 public:
  static constexpr size_t kSharedBytes = size_t{16} * kVectorThreads * Reads::kPieces * Reads::kSlots;

  __device__ __forceinline__ ReadAhead(const Reads& reads, unsigned char* shared, int64_t first,
                                       int64_t stride, int64_t end)
      : reads_(reads), mine_(shared + 16 * threadIdx.x), vector_(first), stride_(stride), end_(end) {
#pragma unroll 1
    for (int k = 0; k + 1 < Reads::kSlots; ++k) begin();
  }

  // Returns the next item, valid until the next call.
  __device__ __forceinline__ Pieces next() {
    wait_for_groups<Reads::kSlots - 2>();
    begin();  // reuses the slot of the previous item
    const Pieces item = slot(used_);
    used_ = after(used_);
    return item;
  }

 private:
  __device__ __forceinline__ Pieces slot(int k) const {
    return {mine_ + k * (Reads::kPieces * 16 * kVectorThreads)};
  }
  __device__ __forceinline__ static int after(int k) {
    return k + 1 == Reads::kSlots ? 0 : k + 1;
  }
  __device__ __forceinline__ void begin() {
    if (vector_ < end_) {
      reads_.begin(slot(begun_), item_, vector_);
      if (++item_ == reads_.items()) {
        item_ = 0;
        vector_ += stride_;
      }
    }
    end_group();
    begun_ = after(begun_);
  }

  const Reads reads_;
  unsigned char* const mine_;
  int64_t vector_;
  const int64_t stride_, end_;
  int item_ = 0, begun_ = 0, used_ = 0;
};

}  // namespace gradwire::cuda
