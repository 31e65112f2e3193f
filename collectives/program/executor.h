// The executor: runs any schedule over any transport with any wire format.
//
// An Allreduce is one rank's program for one buffer, built once from a schedule: a list of kernels and
// exchanges with every address fixed. Per element of a chunk:
//   first send of a partial sum   one fused hop: own gradient + residual + all contributions received so far,
//                                 in ascending rank order -> wire, residual (what this encode lost), and, at
//                                 the owner, the result as everybody will decode it
//   recv_reduce                   the contribution waits, still encoded, until that hop
//   recv_copy                     decoded into the buffer; forwarded, if the schedule says so, as the same
//                                 bytes
// So each rank encodes each chunk at most once, keeps that encode's loss in its own residual, and
//   sum over ranks of residual_new  +  result / scale  ==  sum over ranks of (gradient + residual_old)
// to FP32 rounding; and every rank ends with the same bits.
//
// With the FP32 wire there is nothing to encode: chunks are sent from and received into the buffer itself.
// With exact_inside the same holds for the fast links of a hierarchical schedule, and the wire format is left
// to the slow ones: a rank whose part only ever leaves over fast links rounds nothing, so it neither uses nor
// changes its residual there; the ranks that speak for a node add what came over fast links in FP32 first, in
// rank order with their own part, and then do the hop above.
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
#include "kernels/wire/bf16.h"
#include "kernels/wire/fp32.h"
#include "kernels/wire/fp8.h"

namespace gradwire {

// The size of a slice unless somebody knows better. Measured with a bucket of 25 MB, 4 ranks on 2 cores.
// Links with the delay of 10 Gb/s and 50 us: BF16 two-shot 31.8 ms in one piece, 28.4 ms in slices of 2
// MiB, 28.3 of 1 MiB, 28.9 of 512 KiB; ring 28.1, 26.2, 27.1, 26.9 ms. Gloo over loopback, where cores are
// all there is and nothing can be gained: 24 ms in one piece, 23 to 31 in slices of 2 to 4 MiB, 30 to 42 of
// 512 KiB.
inline constexpr int64_t kSliceBytes = 2 << 20;
// Slices as the links want them: see SchedulePlanner.
inline constexpr int64_t kAutomaticSlices = -1;

// Bytes that `count` values take on a wire.
int64_t wire_bytes(Wire wire, int64_t count);

class Allreduce {
 public:
  struct Options {
    std::string what;       // for error texts, e.g. "bucket 2 of 5 (Q)"
    std::string part = {};  // for traces, e.g. "Q"; empty: all of the bucket
    Wire wire = Wire::fp32;
    bool exact_inside = false;   // fast links carry FP32 whatever `wire` is
    float scale = 1.0f;          // of the result: 1 / world for the mean
    Bf16Rounding rounding = {};  // its first_element is that of data[0]
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

  // Sums data (count) over the ranks of `transport` in place. `residual` (count) is null for none, and
  // ignored with the FP32 wire. Nothing is allocated: give it workspace_bytes() through bind() before the
  // first run.
  Allreduce(Transport& transport, const Schedule& schedule, float* data, float* residual, int64_t count,
            Options options);
  Allreduce(const Allreduce&) = delete;

  size_t workspace_bytes() const { return workspace_bytes_; }
  void bind(void* workspace);  // on the transport's device, 256-byte aligned; may be shared by programs of
                               // one stream

  // The same program for a buffer that has moved; `data` holds count floats. Only while nothing of it is in
  // flight.
  void rebind(float* data);

  // Enqueues everything; later work of `stream` sees the result. All ranks run the same programs in the same
  // order. `phases` is told when the first exchange begins and when the last is over, and by its tracer of
  // each exchange.
  void run(const Stream& stream, BucketPhases* phases = nullptr);

  int slices() const { return slices_; }
  const AllreduceInfo& info() const { return info_; }

 private:
  struct Exchange {
    std::vector<Transfer> transfers;
    ExchangeLabel label;
  };
  struct Operation {
    std::variant<Exchange, Bf16DecodeAddEncode, Bf16Decode, Fp8DecodeAddEncode, Fp8Decode, Fp32Reduce> work;
    int after = -1;       // kernels: the exchange they need, counted from 0; -1: none
    bool needed = false;  // kernels: the next exchange needs this one and those before it
    bool early = false;   // exchanges: may start before the one before has finished
    bool is_exchange() const { return std::holds_alternative<Exchange>(work); }
  };

  class Compiler;
  // Emits operations_ for a workspace at `base`; returns the bytes it needs.
  size_t compile(std::byte* base);
  Call describe() const;
  void find_early();
  void launch(const Stream& stream, const Operation& kernel) const;
  AllreduceInfo describe_exchanges() const;
  void label_exchanges(int bucket);

  Transport& transport_;
  const Options options_;
  const int64_t count_;
  int slices_ = 1;
  const bool overlapped_;  // exchanges have a stream of their own
  const Schedule schedule_;
  const Call call_;
  float* data_;
  float* residual_;
  std::vector<Operation> operations_;
  size_t workspace_bytes_ = 0;
  void* workspace_ = nullptr;
  bool bound_ = false;
  // Between the two streams.
  Event start_, kernels_done_;
  std::vector<Event> exchange_done_;
  AllreduceInfo info_;
  std::vector<TraceLabelPtr> labels_;  // of exchanges, or of groups of them; made when they are first traced
};

}  // namespace gradwire
