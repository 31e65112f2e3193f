// What a bucket's step consists of, in time: compress, communicate, decompress, as often as the codec goes
// through them.
//
// The codec, and the executor under it, say when they enter a phase; a mark on the bucket's stream divides it
// from the one before. So phases follow each other without gaps and their times add up to the time of the
// bucket on that stream. communicate runs from the first exchange of an allreduce to its last: what is added
// up on the way is in it, because it belongs to the schedule and, cut into slices, goes on while others
// travel. Where exchanges run beside kernels on another stream, the kernels' phase counts until the stream
// waits for the exchanges.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "runtime/device.h"
#include "runtime/nvtx.h"
#include "runtime/trace.h"

namespace gradwire {

enum class Phase : uint8_t { compress, communicate, decompress };

// An allreduce, as a trace shows it.
struct ProgramInfo {
  std::string part;  // of the bucket, where it is not all of it: "Q"
  std::string schedule;
  int64_t bytes_sent = 0;  // by this rank
  int exchanges = 0, slices = 1;
};

// The marks of one bucket in one step. Reused for later steps, by when it must have been read.
class BucketPhases {
 public:
  struct Options {
    int bucket = 0;
    bool timing = false;       // off: no marks, only ranges for profilers
    Tracer* tracer = nullptr;  // who is told of each exchange
  };
  BucketPhases() : BucketPhases(Options{}) {}
  explicit BucketPhases(Options options) : options_(options) {}

  void begin(const Stream& stream);
  // The work that `stream` gets from now on belongs to `phase`. Ignored on other streams than begin()'s.
  void enter(const Stream& stream, Phase phase, const ProgramInfo* allreduce = nullptr);
  void end();

  Tracer* tracer() const { return options_.tracer; }
  int bucket() const { return options_.bucket; }

  // Once the marks are done. When this bucket began and ended, in ms since the beginning of another.
  std::pair<double, double> since(const BucketPhases& first) const;
  double ms(Phase phase) const;
  // Every phase as a span on `row`, named after itself and the bucket. `details` are of the bucket.
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
  std::vector<Segment>
      segments_;  // the first used_ are of this step; the last of them is only the end's mark
  size_t used_ = 0;
  bool entered_ = false;
  std::optional<NvtxRange> range_;
};

}  // namespace gradwire
