// A barrier between the thread blocks with the same number in the kernels of all ranks. The kernels run
// concurrently on devices that write each other's memory (runtime/device/peers.h).
//
// Writes of a block's threads before the barrier, including the rank's local window, are visible to the
// blocks of other ranks after the barrier. Each call of a kernel has a fixed number of barriers, at most two.
// Signals only grow, so nothing is reset, and a launch that is captured in a graph needs no new arguments.
//
// The kernel that uses it is the same on a GPU and in tests/simt; only the loads, stores and the clock
// differ.
#pragma once

#include "runtime/device/launch.cuh"
#include "runtime/device/peers.h"

namespace gradwire::cuda {

// Store and load signals between devices. A store also releases the writes of the block's other threads
// before the preceding __syncthreads(). A load returns the newest value and orders nothing, because ordering
// would empty the multiprocessor's L1 at each poll. After the last poll, acquire() and the following
// __syncthreads() order reads for the whole block.
__device__ __forceinline__ void store_signal(uint32_t* word, uint32_t value) {
#ifdef GRADWIRE_SIMT
  simt::store_signal(word, value);
#else
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
#endif
}
__device__ __forceinline__ uint32_t load_signal(const uint32_t* word) {
#ifdef GRADWIRE_SIMT
  return simt::load_signal(word);
#else
  uint32_t value;
  asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
  return value;
#endif
}
__device__ __forceinline__ void acquire() {
#ifndef GRADWIRE_SIMT  // loads acquire in the shim
  asm volatile("fence.acq_rel.sys;" ::: "memory");
#endif
}
__device__ __forceinline__ uint64_t clock_ns() {
#ifdef GRADWIRE_SIMT
  return simt::nanoseconds();
#else
  uint64_t ns;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(ns));
  return ns;
#endif
}

class PeerBarrier {
 public:
  __device__ __forceinline__ explicit PeerBarrier(const PeerMemory& peers)
      : peers_(peers), calls_(*own(kPeerCallsOffset + 4 * static_cast<int>(blockIdx.x))) {}

  // Returns the byte offset of the half that this call uses, the same in every rank's memory.
  __device__ __forceinline__ int64_t half() const {
    return kPeerHeaderBytes + (calls_ & 1u) * peers_.half_bytes;
  }

  // Waits at barrier `which` of this call; all threads of the block call it. Returns false when a peer does
  // not arrive; then all threads must end.
  __device__ __forceinline__ bool wait(uint32_t which) const {
    __syncthreads();
    const uint32_t target = 2 * calls_ + 1 + which;
    const int first = static_cast<int>(threadIdx.x), step = static_cast<int>(blockDim.x);
    for (int peer = first; peer < peers_.world; peer += step) {
      if (peer != peers_.rank) store_signal(signal(peer, peers_.rank), target);
    }
    bool all = true;
    for (int peer = first; peer < peers_.world; peer += step) {
      if (peer != peers_.rank) all = comes(peer, target, which) && all;
    }
    if (first < peers_.world) acquire();
    return __syncthreads_and(all ? 1 : 0) != 0;
  }

  // Ends the call; runs after its last barrier. Also counts for the blocks that this launch lacks, so that
  // all counters agree.
  __device__ __forceinline__ void end_call() const {
    if (threadIdx.x != 0) return;
    for (int block = static_cast<int>(blockIdx.x); block < kMostPeerBlocks;
         block += static_cast<int>(gridDim.x)) {
      *own(kPeerCallsOffset + 4 * block) = calls_ + 1;
    }
  }

 private:
  __device__ __forceinline__ uint32_t* own(int64_t offset) const {
    return reinterpret_cast<uint32_t*>(peers_.windows[peers_.rank] + offset);
  }
  __device__ __forceinline__ uint32_t* signal(int at, int from) const {
    return reinterpret_cast<uint32_t*>(peers_.windows[at]) + static_cast<int>(blockIdx.x) * kMostPeers + from;
  }

  __device__ __forceinline__ bool comes(int peer, uint32_t target, uint32_t which) const {
    const uint32_t* const word = signal(peers_.rank, peer);
#ifdef GRADWIRE_SIMT
    if (simt::options().unheeded_barrier == static_cast<int>(which)) return true;
#endif
    uint64_t began = 0;
#pragma unroll 1
    for (uint32_t looks = 1; static_cast<int32_t>(load_signal(word) - target) < 0; ++looks) {
      if (looks % 1024 != 0) continue;  // reading the report crosses the bus
      if (began == 0) began = clock_ns();
      if (load_signal(&peers_.report->stop) != 0) return false;
      if (clock_ns() - began < static_cast<uint64_t>(peers_.patience_ns)) continue;
      store_signal(&peers_.report->barrier, which);
      store_signal(&peers_.report->missing, static_cast<uint32_t>(peer) + 1);
      return false;
    }
    return true;
  }

  const PeerMemory& peers_;
  const uint32_t calls_;
};

}  // namespace gradwire::cuda
