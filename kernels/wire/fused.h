// An allreduce of ranks that read each other's memory (runtime/peers.h), in one kernel per rank: two-shot or one-shot.
//
// Chunk r is rank r's. Two-shot:
//   1. each rank encodes its part of every other rank's chunk into its own window
//   2. barrier
//   3. each rank adds up its chunk, reading the parts in the others' windows, and encodes the sum into its own
//   4. barrier
//   5. each rank decodes the other chunks from their owners' windows
// One-shot, for small buffers: one barrier, but every rank reads and adds up everything.
//   1. as above; and each rank writes own + residual of its own chunk into its window, unrounded
//   2. barrier
//   3. each rank does, for every chunk, what its owner does, with the owner's random bits
// An exact format (fp32) has the sums of the schedule's halves: chunks are scaled by their owners.
// Either way the bits of result and residual are those of a two-shot schedule that exchanges messages.
//
// A thread block works on the same tiles of a chunk in each step, on all ranks; so a barrier is between the blocks of
// one number, and steps of different blocks overlap. All ranks must launch the same number of blocks.
//
// A kernel whose peers do not come ends after patience_ns, or when the host says stop: its results are then garbage,
// and so is the group.
//
// Reads from other ranks take about 1 us, so each thread has several on their way (kernels/cuda/read_ahead.cuh).
//
// Bytes per element and rank, for n ranks and w bytes on the wire: two-shot 4 + 8 (residual) + 4 + 2 w (2 - 2/n), of
// which 2 w (1 - 1/n) come from other ranks; one-shot w (n - 1) from other ranks. Limit: the links between the ranks,
// and a few multiprocessors' share of the memory. Alignment: any for floats, 16 bytes fast. Deterministic.
#pragma once

#include <cstdint>

#include "kernels/wire/format.h"
#include "runtime/peers.h"

namespace gradwire {

struct FusedAllreduce {
  PeerMemory peers = {};
  bool one_shot = false;
  const float* in = nullptr;        // (count)
  float* out = nullptr;             // (count); may equal `in`
  float* residual = nullptr;        // (count) in and out; null: no error feedback; ignored by exact formats
  float part_scale = 1.0f;          // of parts as they are added up (part_scale.h)
  float scale = 1.0f;               // of the sum of these
  WireRounding rounding = {};       // its first_element is that of element 0
  uint64_t seeds[kMostPeers] = {};  // of all ranks' rounding, by rank; for a one-shot
  int64_t begin[kMostPeers + 1] = {};  // chunk r is [begin[r], begin[r + 1]); count is begin[world]
  int64_t offset[kMostPeers] = {};     // where its wire lies in a half of a window
  // What a lossy one-shot adds there: the floats of the rank's own chunk, and room for wires that nobody reads.
  int64_t exported = 0, scratch = 0;
};

// Reads on their way while a kernel uses one: vectors of a thread or, of formats in blocks, tiles of a thread block.
inline constexpr int kFp32ReadsAhead = 7, kBf16ReadsAhead = 5, kFp8ReadsAhead = 11, kBlockReadsAhead = 7;

// What limits a kernel of kMostPeerBlocks thread blocks on a GPU, beside the links.
struct PeerKernelLimits {
  double bytes_ahead;    // of wires, on their way from other ranks at a time
  double values_per_us;  // added up, encoded or decoded
};
// Estimates: bytes as the kernels read ahead, values from the times of an H200's reduce_encode. No GPUs have timed the
// kernel itself.
PeerKernelLimits peer_kernel_limits(Wire wire);

// Without data: a barrier between the streams of all ranks. What was in a stream before it is done, and visible to the
// others, when what follows it in theirs begins.
FusedAllreduce stream_barrier(const PeerMemory& peers);

// Sets the offsets from `begin`; returns the bytes of half a window that the call needs.
int64_t lay_out(FusedAllreduce& call, Wire wire);

namespace host {
// With the host's ops of `format`. Throws CommError when a peer does not come.
void fused_allreduce(const WireFormat& format, const FusedAllreduce& call);
}  // namespace host

namespace cuda {
void fp32_fused_allreduce(CudaStream stream, const FusedAllreduce& call);
void bf16_fused_allreduce(CudaStream stream, const FusedAllreduce& call);
void fp8_fused_allreduce(CudaStream stream, const FusedAllreduce& call);
}  // namespace cuda

}  // namespace gradwire
