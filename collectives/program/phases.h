// Times the phases of a bucket's step: compress, communicate, decompress, possibly several times each.
//
// The codec and its program report when they enter a phase. A mark on the bucket's stream separates two
// phases. So there are no gaps, and the times add up to the bucket's time on the stream. The phase
// communicate lasts from the first exchange of an allreduce to the last exchange, including the sums between
// exchanges. With slices, sums overlap with exchanges. While exchanges overlap with kernels on another
// stream, the time counts for the kernels' phase until the stream waits for the exchanges.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "runtime/device/device.h"
#include "runtime/device/nvtx.h"
#include "runtime/trace/trace.h"

namespace gradwire {

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
  struct Options {
    int bucket = 0;
    bool timing = false;       // off: no marks, only profiler ranges
    Tracer* tracer = nullptr;  // receives each exchange
  };
  BucketPhases() : BucketPhases(Options{}) {}
  explicit BucketPhases(Options options) : options_(options) {}

  void begin(const Stream& stream);
  // Assigns later work on `stream` to `phase`. Ignored for streams other than begin()'s.
  void enter(const Stream& stream, Phase phase, const ProgramInfo* allreduce = nullptr);
  void end();

  Tracer* tracer() const { return options_.tracer; }
  int bucket() const { return options_.bucket; }

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

  Options options_;
  Stream stream_;
  // The first used_ segments belong to this step; the last of them only marks the end.
  std::vector<Segment> segments_;
  size_t used_ = 0;
  bool entered_ = false;
  std::optional<NvtxRange> range_;
};

}  // namespace gradwire
