// Asynchronous copies from global to shared memory (cp.async) and loads of matrices from shared memory
// (ldmatrix), each with a plain form for tests/simt. There a copy happens when its thread waits for it, so
// that tests find a missing wait.
//
//   copy_async<16>(to, from, exists);  // any number of copies
//   end_copies();                      // they are a group
//   wait_for_copies<0>();              // for all groups but the 0 newest
//   __syncthreads();                   // other threads' copies are complete only now
#pragma once

#include <cstdint>

#include "runtime/device/launch.cuh"

namespace gradwire::cuda {

#ifndef GRADWIRE_SIMT
__device__ __forceinline__ uint32_t shared_address(const void* at) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(at));
}
#endif

// Begins to copy kBytes (4 or 16), or zeros if not `exists`. Both addresses are multiples of kBytes.
template <int kBytes>
__device__ __forceinline__ void copy_async(void* to, const void* from, bool exists) {
  static_assert(kBytes == 4 || kBytes == 16);
#ifdef GRADWIRE_SIMT
  simt::async_copies().waiting.push_back({to, exists ? from : nullptr, kBytes, simt::async_copies().group});
#else
  const int bytes = exists ? kBytes : 0;
  if constexpr (kBytes == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from),
                 "r"(bytes)
                 : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared_address(to)), "l"(from),
                 "r"(bytes)
                 : "memory");
  }
#endif
}

// Ends a group of this thread's copies.
__device__ __forceinline__ void end_copies() {
#ifdef GRADWIRE_SIMT
  ++simt::async_copies().group;
#else
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Waits for this thread's groups of copies, except the newest ones.
template <int kNewest>
__device__ __forceinline__ void wait_for_copies() {
#ifdef GRADWIRE_SIMT
  auto& [waiting, group] = simt::async_copies();
  std::erase_if(waiting, [&](const simt::AsyncCopies::Copy& copy) {
    if (copy.group >= group - kNewest) return false;
    for (int i = 0; i < copy.bytes / 4; ++i) {
      static_cast<uint32_t*>(copy.to)[i] =
          copy.from != nullptr ? static_cast<const uint32_t*>(copy.from)[i] : 0;
    }
    return true;
  });
#else
  asm volatile("cp.async.wait_group %0;" ::"n"(kNewest) : "memory");
#endif
}

}  // namespace gradwire::cuda
