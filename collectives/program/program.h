// A program: one rank's part of a collective, for one buffer, over any transport with any wire format.
//
// It is built once from a schedule: a list of kernels and exchanges with every address fixed. Per element of a
// chunk:
//   first send of a partial sum   one fused op: this rank's own part + residual + all contributions received
//                                 so far, in ascending rank order -> wire, residual (what this encode lost),
//                                 and, at the owner, the result as everybody will decode it
//   recv_reduce                   the contribution waits, still encoded, until then
//   recv_copy                     decoded into the result; forwarded, if the schedule says so, as the same
//                                 bytes
//   the end of a reduce_scatter   the owner adds up what it has and never encodes it
// So each rank encodes each chunk at most once, keeps that encode's loss in its own residual, and
//   sum over ranks of residual_new  +  result / scale  ==  sum over ranks of (own part + residual_old)
// to FP32 rounding; and every rank ends with the same bits.
//
// With an exact wire there is nothing to encode: chunks are sent from and received into the buffers
// themselves. With fp32_intra_node the same holds for the links inside a node of a hierarchical schedule, and
// the wire format is left to those between nodes: a rank whose part only ever stays inside its node rounds
// nothing, so it neither uses nor changes its residual there; the ranks that speak for a node add what came
// from inside it in FP32 first, in rank order with their own part, and then encode as above.
//
// Overlap: with a stream for transfers, chunks are cut in slices (pipelined() in schedule.h) and exchanges
// run on that stream, kernels on the caller's, ordered by events where one needs the other: while one slice
// travels, another is added up; and an exchange that has nothing to do with the memory of the one before is
// posted before that one is done, so that links do not idle between the two. The sums of an element do not
// depend on the slice that it is in, so neither do the bits.
#pragma once

#include <cstddef>
#include <string>
#include <variant>
#include <vector>

#include "collectives/program/phases.h"
#include "collectives/schedule/schedule.h"
#include "collectives/transport/transport.h"
#include "kernels/wire/formats.h"
#include "kernels/wire/fp32.h"
#include "runtime/dtype.h"

namespace gradwire {

// The size of a slice unless somebody knows better. Measured with a bucket of 25 MB, 4 ranks on 2 cores.
// Links with the delay of 10 Gb/s and 50 us: BF16 two-shot 31.8 ms in one piece, 28.4 ms in slices of 2
// MiB, 28.3 of 1 MiB, 28.9 of 512 KiB; ring 28.1, 26.2, 27.1, 26.9 ms. TCP over loopback, where cores are
// all there is and nothing can be gained: 24 ms in one piece, 23 to 31 in slices of 2 to 4 MiB, 30 to 42 of
// 512 KiB.
inline constexpr int64_t kSliceBytes = 2 << 20;
// Slices as the links want them: see SchedulePlanner.
inline constexpr int64_t kAutomaticSlices = -1;

// What a program works on. `in` and `out` lie on the transport's device; a rank's shard is its own chunks
// (Schedule::owner) in ascending order, Program::shard_elements() in all.
//   allreduce        in, out: (count), perhaps the same memory
//   reduce_scatter   in: (count), not changed; out: this rank's shard, perhaps the same memory as its place
//                    in `in` where that is one piece
//   all_gather       in: this rank's shard, perhaps in its place in `out`; out: (count)
// Sums are FP32 whatever the dtype: BF16 is widened into the workspace and rounded to nearest on the way out.
struct ProgramBuffers {
  const void* in = nullptr;
  void* out = nullptr;
  float* residual = nullptr;  // (count) in and out; null: no error feedback. Ignored with an exact wire
  int64_t count = 0;
  DType dtype = DType::f32;  // of in and out
};

class Program {
 public:
  struct Options {
    std::string what;       // for error texts, e.g. "bucket 2 of 5 (Q)"
    std::string part = {};  // for traces, e.g. "Q"; empty: all of the bucket
    Wire wire = kFp32;
    bool fp32_intra_node = false;  // links inside a node carry FP32 whatever `wire` is
    float scale = 1.0f;            // of the result: 1 / world for the mean
    WireRounding rounding = {};    // its first_element is that of element 0 of `count`
    // The compression spec that this is a part of. Ranks must agree on it, as on all of the above but the
    // rounding's seed.
    std::string spec = {};
    // Where exchanges run beside the kernels; empty: everything on the stream given to run(), in one slice.
    Stream transfers = {};
    // Exchanges run on `transfers` even in one slice: for programs that are under way at once, on streams of
    // their own, and whose exchanges must keep one order on all ranks.
    bool beside_others = false;
    // Messages larger than this are cut into slices of about this size, kMostSlices at most; 0: never.
    // Needs `transfers`.
    int64_t slice_bytes = 0;
  };
  static constexpr int kMostSlices = 16;
  // A trace shows so many exchanges of one run at most; where there are more, several are one span.
  static constexpr int kMostSpans = 64;
  // Into how many slices messages of at most slice_bytes cut the chunks; 1 when slice_bytes is 0.
  static int slices_for(const Schedule& schedule, int64_t count, Wire wire, int64_t slice_bytes);

  // Nothing is allocated: give it workspace_bytes() through bind() before the first run.
  Program(Transport& transport, const Schedule& schedule, const ProgramBuffers& buffers, Options options);
  Program(const Program&) = delete;

  size_t workspace_bytes() const { return workspace_bytes_; }
  void bind(void* workspace);  // on the transport's device, 256-byte aligned; may be shared by programs of
                               // one stream

  // The same program for buffers that have moved. Only while nothing of it is in flight.
  void rebind(const void* in, void* out);

  // Enqueues everything; later work of `stream` sees the result. All ranks run the same programs in the same
  // order. `phases` is told when the first exchange begins and when the last is over, and by its tracer of
  // each exchange.
  void run(const Stream& stream, BucketPhases* phases = nullptr);

  int64_t shard_elements() const;  // of this rank
  int slices() const { return slices_; }
  const ProgramInfo& info() const { return info_; }

 private:
  struct Exchange {
    std::vector<Transfer> transfers;
    ExchangeLabel label;
  };
  struct Operation {
    std::variant<Exchange, ReduceEncode, Decode, Reduce> work;
    int after = -1;       // kernels: the exchange they need, counted from 0; -1: none
    bool needed = false;  // kernels: the next exchange needs this one and those before it
    bool early = false;   // exchanges: may start before the one before has finished
    bool is_exchange() const { return std::holds_alternative<Exchange>(work); }
  };

  class Compiler;
  // Emits operations_ for a workspace at `base`; returns the bytes it needs.
  size_t compile(std::byte* base);
  int64_t elements_in() const;
  int64_t elements_out() const;
  Call describe(int64_t count, DType dtype) const;
  void find_early();
  void launch(const Stream& stream, const Operation& kernel) const;
  ProgramInfo describe_exchanges() const;
  void label_exchanges(int bucket);

  Transport& transport_;
  const Options options_;
  int slices_ = 1;
  const bool overlapped_;  // exchanges have a stream of their own
  const Schedule schedule_;
  const Call call_;
  ProgramBuffers buffers_;
  float *wide_in_ = nullptr, *wide_out_ = nullptr;  // BF16 buffers widened, in the workspace; null: FP32
  std::vector<Operation> operations_;
  size_t workspace_bytes_ = 0;
  void* workspace_ = nullptr;
  bool bound_ = false;
  // Between the two streams.
  Event start_, kernels_done_;
  std::vector<Event> exchange_done_;
  ProgramInfo info_;
  std::vector<TraceLabelPtr> labels_;  // of exchanges, or of groups of them; made when they are first traced
};

}  // namespace gradwire
