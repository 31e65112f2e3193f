// An allreduce over peer access (runtime/device/peers.h), in one kernel per rank: two-shot or one-shot.
//
// Chunk r belongs to rank r. Two-shot:
//   1. each rank encodes its part of every other rank's chunk into its peer memory
//   2. barrier
//   3. each rank sums its chunk, reading the parts in the others' peer memory, and encodes the sum into its
//      own
//   4. barrier
//   5. each rank decodes the other chunks from their owners' peer memory
// One-shot, for small buffers: one barrier, but every rank reads and sums everything.
//   1. as in two-shot; each rank also writes own + residual of its chunk into its peer memory, unrounded
//   2. barrier
//   3. each rank does the owner's work for every chunk, with the owner's random bits
// An exact format (fp32) sums as the schedule's halves do: owners scale their chunks. In both cases the bits
// of result and residual are those of a two-shot schedule that exchanges messages.
//
// A thread block processes the same tiles of a chunk in each step, on all ranks. A barrier therefore
// synchronizes the blocks with the same number, and steps of different blocks overlap. All ranks must launch
// the same number of blocks.
//
// A kernel whose peers do not arrive ends after patience_ns, or when the host requests a stop. Its results
// are then undefined, and the group is unusable.
//
// Reads from other ranks take about 1 us, so each thread has several reads in flight
// (kernels/cuda/read_ahead.cuh).
//
// Bytes per element and rank, for n ranks and w bytes on the wire: two-shot 4 + 8 (residual) + 4 + 2 w (2 -
// 2/n), of which 2 w (1 - 1/n) come from other ranks; one-shot w (n - 1) from other ranks. Limit: the links
// between the ranks, and a few multiprocessors' share of the memory bandwidth. Alignment: any for floats,
// 16-byte alignment is fast. Deterministic.
#pragma once

#include <cstdint>

#include "kernels/wire/format.h"
#include "runtime/device/peers.h"

namespace gradwire {

struct FusedAllreduce {
  PeerMemory peers = {};
  bool one_shot = false;
  const float* in = nullptr;        // (count)
  float* out = nullptr;             // (count); may equal `in`
  float* residual = nullptr;        // (count) in and out; null: no error feedback; ignored by exact formats
  float part_scale = 1.0f;          // scale of each part in the sum (part_scale.h)
  float scale = 1.0f;               // scale of the sum
  WireRounding rounding = {};       // first_element is the index of element 0
  uint64_t seeds[kMostPeers] = {};  // seeds of all ranks' rounding, by rank; used by a one-shot
  int64_t begin[kMostPeers + 1] = {};  // chunk r is [begin[r], begin[r + 1]); count is begin[world]
  int64_t offset[kMostPeers] = {};     // offset of chunk r's encoding in half a window
  // Offsets that only a lossy one-shot uses: the floats of the rank's chunk, and space for encodings that are
  // never read.
  int64_t exported = 0, scratch = 0;
};

// The number of reads in flight while a kernel uses another value: vectors of a thread or, for block formats,
// tiles of a thread block.
inline constexpr int kFp32ReadsAhead = 7, kBf16ReadsAhead = 5, kFp8ReadsAhead = 11, kBlockReadsAhead = 7;

// The limits of a kernel of kMostPeerBlocks thread blocks on a GPU, without the limit of the links.
struct PeerKernelLimits {
  double bytes_ahead;    // encoded bytes in flight from other ranks
  double values_per_us;  // values summed, encoded or decoded per microsecond
};
// Returns estimates: the bytes follow from the kernels' reads ahead, the values from measurements of
// reduce_encode on an H200. The kernel itself has not been measured on GPUs.
PeerKernelLimits peer_kernel_limits(Wire wire);

// Returns a call without data: a barrier between the streams of all ranks. Earlier work in each stream is
// complete, and visible to all ranks, before later work in any stream begins.
FusedAllreduce stream_barrier(const PeerMemory& peers);

// Computes the offsets from `begin`. Returns the number of bytes that the call needs in half a window.
int64_t lay_out(FusedAllreduce& call, Wire wire);

namespace host {
// Runs the allreduce with the host's ops of `format`. Throws CommError when a peer does not arrive.
void fused_allreduce(const WireFormat& format, const FusedAllreduce& call);
}  // namespace host

namespace cuda {
void fp32_fused_allreduce(CudaStream stream, const FusedAllreduce& call);
void bf16_fused_allreduce(CudaStream stream, const FusedAllreduce& call);
void fp8_fused_allreduce(CudaStream stream, const FusedAllreduce& call);
}  // namespace cuda

}  // namespace gradwire
