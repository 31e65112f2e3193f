// Asynchronous copies from global to shared memory (cp.async) and matrices in shared memory
// (ldmatrix, stmatrix), each with a plain form for tests/simt. There a copy happens when its thread waits for
// it, so that tests find a missing wait.
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

// Loads four matrices of 8 x 8 values of 16 bits from shared memory. Lane i passes row i % 8 of matrix i / 8.
// Word i is the lane's part of matrix i, or of its transpose: row lane / 4, columns lane % 4 * 2 and the
// next.
template <bool kTransposed = false>
__device__ __forceinline__ void load_matrices(const void* row, uint32_t (&words)[4]) {
#ifdef GRADWIRE_SIMT
  const int r = static_cast<int>(threadIdx.x) % 32 / 4, c = static_cast<int>(threadIdx.x) % 4 * 2;
  const auto element = [&](int matrix, int at_row, int column) -> uint32_t {
    const auto at = __shfl_sync(0xffffffffu, reinterpret_cast<unsigned long long>(row), 8 * matrix + at_row);
    return reinterpret_cast<const uint16_t*>(at)[column];
  };
  for (int i = 0; i < 4; ++i) {
    words[i] = kTransposed ? element(i, c, r) | element(i, c + 1, r) << 16
                           : element(i, r, c) | element(i, r, c + 1) << 16;
  }
#else
  if constexpr (kTransposed) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "r"(shared_address(row))
                 : "memory");
  } else {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "r"(shared_address(row))
                 : "memory");
  }
#endif
}

// Stores four matrices, the reverse of load_matrices().
__device__ __forceinline__ void store_matrices(void* row, const uint32_t (&words)[4]) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared_address(row)),
               "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3])
               : "memory");
#else
  const int lane = static_cast<int>(threadIdx.x) % 32;
  for (int i = 0; i < 4; ++i) {
    const auto at = __shfl_sync(0xffffffffu, reinterpret_cast<unsigned long long>(row), 8 * i + lane / 4);
    reinterpret_cast<uint32_t*>(at)[lane % 4] = words[i];
  }
#endif
}

}  // namespace gradwire::cuda
