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
// (kernels/wire/format.h), so that they are finite whenever the average is. Residuals are always in the
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
#include <cstdint>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "collectives/schedule/schedule.h"
#include "collectives/transport/transport.h"
#include "kernels/wire/floats.h"
#include "kernels/wire/format.h"
#include "runtime/device/device.h"
#include "runtime/device/nvtx.h"
#include "runtime/trace/trace.h"

namespace gradwire {

// Times the phases of a bucket's step: compress, communicate, decompress, possibly several times each.
//
// The codec and its program report when they enter a phase. A mark on the bucket's stream separates two
// phases. So there are no gaps, and the times add up to the bucket's time on the stream. The phase
// communicate lasts from the first exchange of an allreduce to the last exchange, including the sums between
// exchanges. With slices, sums overlap with exchanges. While exchanges overlap with kernels on another
// stream, the time counts for the kernels' phase until the stream waits for the exchanges.

enum class Phase : uint8_t { compress, communicate, decompress };

// A description of an allreduce, for traces.
struct ProgramInfo {
  std::string part;  // part of the bucket, e.g. "Q"; empty: the whole bucket
  std::string schedule;
  int64_t bytes_sent = 0;  // bytes that this rank sends
  int exchanges = 0, slices = 1;
};

// One bucket's marks in one step. The times must be read before a later step reuses the object.
class BucketPhases {
 public:
  // Without `timing` there are no marks, only profiler ranges. `tracer` receives each exchange.
  explicit BucketPhases(int bucket = 0, bool timing = false, Tracer* tracer = nullptr)
      : bucket_(bucket), timing_(timing), tracer_(tracer) {}

  void begin(const Stream& stream);
  // Assigns later work on `stream` to `phase`. Ignored for streams other than begin()'s.
  void enter(const Stream& stream, Phase phase, const ProgramInfo* allreduce = nullptr);
  void end();

  Tracer* tracer() const { return tracer_; }
  int bucket() const { return bucket_; }

  // Returns when this bucket began and ended, in ms since the beginning of `first`. This function and the
  // functions below are valid only once the marks are done.
  std::pair<double, double> since(const BucketPhases& first) const;
  double ms(Phase phase) const;
  // Adds every phase to the trace as a span on `row`, named after the phase and the bucket. `details`
  // describe the bucket.
  void trace(Tracer& tracer, const std::string& row, int64_t step,
             const std::vector<std::pair<std::string, TraceLabel::Value>>& details) const;

 private:
  struct Segment {
    Phase phase = Phase::compress;
    const ProgramInfo* allreduce = nullptr;
    Event begin;
  };
  Segment& next(const Stream& stream);

  const int bucket_;
  const bool timing_;
  Tracer* const tracer_;
  Stream stream_;
  // The first used_ segments belong to this step; the last of them only marks the end.
  std::vector<Segment> segments_;
  size_t used_ = 0;
  bool entered_ = false;
  std::optional<NvtxRange> range_;
};

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
    // Messages larger than this are cut into slices of about this size, at most kMaxSlices; 0: never. Needs
    // `transfers`.
    int64_t slice_bytes = 0;
  };
  static constexpr int kMaxSlices = 16;
  // Returns the slices per chunk that keep messages within slice_bytes; 1 if slice_bytes is 0.
  static int slices_for(const Schedule& schedule, int64_t count, Wire wire, int64_t slice_bytes,
                        const Shards& shards = {});

  // Plans the program. Allocates no memory: the caller passes a workspace of workspace_bytes() bytes to
  // bind() before the first run. Throws BadInput if the schedule, the format and the transport do not fit
  // together.
  Program(Transport& transport, const Schedule& schedule, const ProgramBuffers& buffers, Options options);
  Program(const Program&) = delete;

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
  const ProgramInfo& info() const { return info_; }

 private:
  struct Exchange {
    std::vector<Transfer> transfers;
    ExchangeLabel label;
    bool early = false;  // may start before the previous exchange has finished

    int64_t bytes(Transfer::Kind kind) const;
  };
  struct Kernel {
    std::variant<ReduceEncode, Decode, Reduce> work;
    int after = -1;           // the exchange that the kernel depends on, counted from 0; -1: none
    int before = -1;          // the exchange that depends on the kernel; -1: none
    bool feeds_next = false;  // the next kernel depends on this kernel
    bool needed = false;      // the next exchange depends on this kernel and on the earlier ones
  };
  using Operation = std::variant<Exchange, Kernel>;
  class Compiler;  // compiler.cpp
  class Run;       // one run: its streams, and the numbers of exchanges started and finished

  bool widens() const { return buffers_.dtype != DType::f32; }
  Call describe() const;
  // Chooses the FP32 memory and compiles the operations for a workspace at this address. Address 0 serves to
  // measure the workspace.
  void place(uintptr_t workspace);
  // Compiles the operations. Returns the size of the workspace. Throws BadInput if the schedule cannot be
  // carried out in this format.
  size_t compile(uintptr_t workspace);
  void label_spans(int bucket);
  // Makes `later` wait for all work enqueued so far on `earlier`.
  void order(const Stream& earlier, const Stream& later);

  // The plan: the members are initialized in this order.
  Transport& transport_;
  const Options options_;
  ProgramBuffers buffers_;
  const bool uses_library_;  // the transport's own allreduce carries out the schedule
  const int slices_;
  const bool overlapped_;  // exchanges run on a separate stream
  const Schedule schedule_;
  const std::vector<ElementRange> ranges_;  // [chunk]
  const Call call_;  // e.g. "allreduce of bucket 1 of 2 (4096 floats, ...)", and what ranks must agree on

  // FP32 memory: the caller's buffers, or copies of 16-bit buffers in the workspace.
  const float* in_ = nullptr;
  float *out_ = nullptr, *wide_in_ = nullptr;
  int64_t elements_in_ = 0, elements_out_ = 0;  // sizes of the buffers
  bool bound_ = false;
  uintptr_t workspace_ = 0;
  size_t workspace_bytes_ = 0;
  std::vector<Operation> operations_;  // empty if the transport's own allreduce carries out the schedule
  ProgramInfo info_;
  int exchanges_per_span_ = 1;         // a span of a trace
  Event begun_, ordered_;              // if overlapped
  std::vector<Event> exchange_done_;   // [exchange], if overlapped
  std::vector<TraceLabelPtr> labels_;  // [span]; created when first traced
};

// Caches programs by buffer, for callers that pass memory with each call (the C ABI's gw_allreduce, the NCCL
// interposer).
//
// All programs of a cache share one workspace, so the programs must run on one stream or one at a time.

template <typename Key>
class ProgramCache {
 public:
  struct Entry {
    Key key;
    Buffer residual;  // empty: no error feedback
    std::unique_ptr<Program> program;
  };

  // Creates an empty cache for at most `most` programs. `allocate` returns memory for the workspace.
  ProgramCache(size_t most, std::function<Buffer(size_t bytes)> allocate)
      : most_(most), allocate_(std::move(allocate)) {}

  Entry* find(const Key& key) {
    const auto at = places_.find(key);
    if (at == places_.end()) return nullptr;
    entries_.splice(entries_.begin(), entries_, at->second);
    return &entries_.front();
  }

  // Adds an entry after find() returned null. Evicts the least recently used entry if the cache is full. May
  // free or rebind memory, so none of the cache's programs may be in flight. Exception: on CUDA programs may
  // be in flight if a stream that waits for the programs releases all memory in its order, including
  // residuals.
  Entry& add(Entry entry) {
    if (entries_.size() >= most_) {
      places_.erase(entries_.back().key);
      entries_.pop_back();
    }
    entries_.push_front(std::move(entry));
    places_[entries_.front().key] = entries_.begin();
    if (entries_.front().program->workspace_bytes() > workspace_.bytes()) {
      workspace_ = allocate_(entries_.front().program->workspace_bytes());
      for (Entry& e : entries_) e.program->bind(workspace_.data());
    } else {
      entries_.front().program->bind(workspace_.data());
    }
    return entries_.front();
  }

  const std::list<Entry>& entries() const { return entries_; }  // the most recently used entry is first

 private:
  const size_t most_;
  const std::function<Buffer(size_t)> allocate_;
  Buffer workspace_;
  std::list<Entry> entries_;
  std::map<Key, typename std::list<Entry>::iterator> places_;
};

}  // namespace gradwire
