// Memory that the ranks of a group read and write directly: threads of one process, or GPUs of one node
// between which loads and stores work (NVLink).
//
// Each rank has a window of peer memory: signals, then two halves for data. A rank writes the halves of its
// window, reads the halves of all ranks, and writes its signals into the windows of the other ranks. Calls
// alternate between the halves, so that data that a slower rank still reads is not overwritten: a rank enters
// call k + 2 only after all other ranks have begun call k + 1.
//
//   uint32_t signals[kMostPeerBlocks][kMostPeers]   [block][from]: how many barriers `from` has reached
//   uint32_t calls[kMostPeerBlocks]                 calls so far; equal between calls; an odd count uses the
//                                                   second half
//   bytes halves[2][half_bytes]                     at kPeerHeaderBytes
// Signals and calls are initially 0.
#pragma once

#include <cstddef>
#include <cstdint>

namespace gradwire {

inline constexpr int kMostPeers = 64;
// The largest number of thread blocks of one kernel. All blocks must be resident at once, so the number is
// small enough to leave room for other work.
inline constexpr int kMostPeerBlocks = 32;
// The number of groups of ranks whose kernels fit on a GPU at once. With more groups, two ranks could
// deadlock: each runs the kernel of a group in which the other rank's kernel has not started.
inline constexpr int kPeerGroupsAtOnce = 4;
inline constexpr int64_t kPeerCallsOffset = int64_t{4} * kMostPeerBlocks * kMostPeers;
inline constexpr int64_t kPeerHeaderBytes = kPeerCallsOffset + 256;
static_assert(kPeerHeaderBytes % 256 == 0 && kMostPeerBlocks * 4 <= 256);

// Returns the number of thread blocks of a rank's kernel where `ranks` of a group share a device with
// `multiprocessors` (0: unknown): all blocks of kPeerGroupsAtOnce groups are resident at once, one on each
// multiprocessor, or they deadlock.
inline constexpr int peer_blocks(int multiprocessors, int ranks) {
  const int most = multiprocessors > 0 && multiprocessors / kPeerGroupsAtOnce < kMostPeerBlocks
                       ? multiprocessors / kPeerGroupsAtOnce
                       : kMostPeerBlocks;
  return most / ranks > 1 ? most / ranks : 1;
}

inline constexpr int64_t peer_window_bytes(int64_t half_bytes) {
  return kPeerHeaderBytes + 2 * half_bytes;
}

// Reports that a call will not complete. Shared by the host and kernels, in page-locked memory of the host.
struct PeerReport {
  uint32_t stop = 0;     // set by the host: end the wait
  uint32_t missing = 0;  // set by a kernel whose wait timed out to 1 + the missing rank
  uint32_t barrier = 0;  // the index of the barrier that timed out, from 0
};

struct PeerMemory {
  std::byte* windows[kMostPeers] = {};  // by rank, in this rank's address space; 16-byte aligned
  int rank = 0, world = 1;
  // The limit of a kernel's thread blocks: lower where ranks share a device; the same on all ranks.
  int blocks = kMostPeerBlocks;
  int64_t half_bytes = 0;  // a multiple of 256
  PeerReport* report = nullptr;
  int64_t patience_ns = 0;  // the longest wait at a barrier
};

}  // namespace gradwire
