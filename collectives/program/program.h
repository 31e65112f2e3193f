// A program: one rank's part of a collective, for one buffer, over any transport with any wire format.
//
// The program's plan is made once from a schedule, and compiled into kernels and exchanges with fixed
// addresses. The operations for each element of a chunk:
//   first send of a partial sum   one fused op: this rank's own part + residual + all contributions received
//                                 so far, in ascending rank order -> wire, residual (the error of this
//                                 encode), and, at the owner, the result as all ranks will decode it
//   recv_reduce                   the contribution stays encoded until this rank's first send
//   recv_copy                     the value is decoded into the result, and forwarded as the same bytes
//   the end of a reduce_scatter   the owner adds up its contributions and never encodes the sum
// So each rank encodes each chunk at most once and keeps the error of this encode in its residual. To FP32
// rounding,
//   sum over ranks of residual_new  +  result / scale  ==  sum over ranks of (own part + residual_old)
// and every rank ends with the same bits.
//
// If scale < 1, as for an average, sums of parts are in smaller units than the parts
// (kernels/wire/part_scale.h), so that they are finite whenever the average is. Residuals are always in the
// units of a part.
//
// With an exact format no value is encoded: chunks are sent directly from the buffers and received directly
// into the buffers. With fp32_intra_node the same holds for links inside a node of a hierarchical schedule,
// and only links between nodes use the wire format. A rank whose part of a chunk never leaves its node rounds
// no value, so the rank neither uses nor changes the chunk's residual. The ranks that represent a node first
// add all parts from inside the node in FP32, in rank order, and then encode as above.
//
// With a stream for transfers, chunks are cut into slices (pipelined() in schedule.h). Exchanges run on the
// stream for transfers and kernels on the caller's stream. Events order dependent work: while a slice is in
// flight, another slice is added up. An exchange that does not touch the previous exchange's memory is posted
// before the previous exchange is done, so that links do not idle. The sum of an element does not depend on
// its slice.
//
// schedule=nccl is one call of NCCL's allreduce of floats, between the caller's buffers. NCCL chooses the
// order of additions; the only error is FP32 rounding. All other schedules give the same bits on every rank
// and transport.
#pragma once

#include <cstddef>
#include <memory>
#include <string>

#include "collectives/program/phases.h"
#include "collectives/schedule/schedule.h"
#include "collectives/transport/transport.h"
#include "kernels/wire/formats.h"
#include "runtime/device/dtype.h"

namespace gradwire {

struct ProgramMemory;
struct ProgramPlan;
class ProgramExecutor;

// The default size of a slice in bytes. Measured with a bucket of 25 MB and 4 ranks on 2 cores. With links
// simulated at 10 Gb/s and 50 us, a BF16 two-shot takes 31.8 ms unsliced, 28.4 ms in slices of 2 MiB, 28.3 ms
// in slices of 1 MiB, and 28.9 ms in slices of 512 KiB; a ring takes 28.1, 26.2, 27.1 and 26.9 ms. TCP over
// loopback is bound by the cores, so slices cannot help: 24 ms unsliced, 23 to 31 ms in slices of 2 to 4 MiB,
// 30 to 42 ms in slices of 512 KiB.
inline constexpr int64_t kSliceBytes = 2 << 20;
// Slice size chosen from the cost of the links: see SchedulePlanner.
inline constexpr int64_t kAutomaticSlices = -1;

// A program's buffers. `in` and `out` are on the transport's device. A rank's shard is its own chunks
// (Schedule::owner) in ascending order, elements_owned() in total. With `shards`, the caller chooses each
// shard's size, and shards are in rank order.
//   allreduce        in, out: (count), may be the same memory
//   reduce_scatter   in: (count), unchanged; out: this rank's shard, may be its place in `in` if contiguous
//   all_gather       in: this rank's shard, may be its place in `out` if contiguous; out: (count)
//   broadcast        in: (count) at the root, not used elsewhere; out: (count), may be `in`
// Sums are FP32 for every dtype: BF16 and FP16 are widened into the workspace, and the result is rounded to
// nearest.
struct ProgramBuffers {
  const void* in = nullptr;
  void* out = nullptr;
  // The residual, which the program updates; null: no error feedback. Ignored with an exact wire. Size:
  // (count); in an all_gather this rank's shard; in a broadcast (count) at the root.
  float* residual = nullptr;
  int64_t count = 0;
  DType dtype = DType::f32;  // type of in and out
  Shards shards = {};        // the same on all ranks; empty: the schedule's even cut
};

class Program {
 public:
  struct Options {
    std::string what;       // for error texts, e.g. "bucket 2 of 5 (Q)"
    std::string part = {};  // for traces, e.g. "Q"; empty: the whole bucket
    Wire wire = kFp32;
    bool fp32_intra_node = false;  // links inside a node carry FP32 regardless of `wire`
    float scale = 1.0f;            // scale of the result: 1 / world for the mean
    WireRounding rounding = {};    // first_element: number of the buffer's first element
    // The program's compression spec. Ranks must agree on the spec and on all options above, except the
    // rounding's seed.
    std::string spec = {};
    // The stream for exchanges that overlap with kernels; empty: all work runs on run()'s stream, in one
    // slice.
    Stream transfers = {};
    // Whether exchanges run on `transfers` even with one slice. Needed for programs that run concurrently on
    // several streams, because the programs' exchanges must have the same order on all ranks.
    bool beside_others = false;
    // Messages larger than this are cut into slices of about this size, at most kMostSlices; 0: never. Needs
    // `transfers`.
    int64_t slice_bytes = 0;
  };
  static constexpr int kMostSlices = 16;
  // Returns the slices per chunk that keep messages within slice_bytes; 1 if slice_bytes is 0.
  static int slices_for(const Schedule& schedule, int64_t count, Wire wire, int64_t slice_bytes,
                        const Shards& shards = {});

  // Plans the program. Allocates no memory: the caller passes a workspace of workspace_bytes() bytes to
  // bind() before the first run.
  Program(Transport& transport, const Schedule& schedule, const ProgramBuffers& buffers, Options options);
  Program(const Program&) = delete;
  ~Program();

  size_t workspace_bytes() const { return workspace_bytes_; }
  // Sets the workspace, which is on the transport's device and aligned to 256 bytes. Programs of one stream
  // may share a workspace.
  void bind(void* workspace);

  // Changes the addresses of the program's buffers. None of the program's work may be in flight.
  void rebind(const void* in, void* out);
  void rebind_residual(float* residual);

  // Enqueues the program; later work on `stream` sees the result. All ranks run the same programs in the same
  // order. Reports to `phases` when the first exchange begins and the last ends, and each exchange to its
  // tracer.
  void run(const Stream& stream, BucketPhases* phases = nullptr);

  const ProgramBuffers& buffers() const { return buffers_; }
  const ProgramInfo& info() const;

 private:
  bool widens() const { return buffers_.dtype != DType::f32; }
  ProgramMemory memory(std::byte* workspace);
  void bind_executor();

  const std::unique_ptr<const ProgramPlan> plan_;
  ProgramBuffers buffers_;
  // Copies of 16-bit buffers, widened to FP32, in the workspace; null: the buffers are FP32.
  float *wide_in_ = nullptr, *wide_out_ = nullptr;
  size_t wide_bytes_ = 0;
  const std::unique_ptr<ProgramExecutor> executor_;
  const size_t workspace_bytes_;
  std::byte* workspace_ = nullptr;
  bool bound_ = false;
};

}  // namespace gradwire
