// The file of --trace: the spans of all ranks in the trace event format of Perfetto and chrome://tracing,
// with a process per rank and a thread per stream. docs/training.md describes it.
#pragma once

#include <mutex>
#include <string>
#include <vector>

#include "runtime/trace/trace.h"
#include "runtime/util/file.h"
#include "trainer/config/config.h"

namespace gradwire {

// Returns a rank's spans as a comma-separated list of events; "" for none. `error_us`: bound on the error of
// the rank's clock.
std::string trace_events(int rank, Device device, std::vector<TraceSpan> spans, size_t dropped,
                         double error_us);

// Collects the ranks' events and writes the file (runtime/util/file.h). A write error does not end the
// run: lose_output() reports it.
class TraceFile {
 public:
  // Prepares to write config.trace if `rank` is 0; other ranks write separate files. Throws BadInput if the
  // file cannot be written.
  explicit TraceFile(const TrainConfig& config, int rank = 0);

  // Adds a rank's part. Callable from any thread. The last part writes the file. `complete`: false for the
  // spans that a rank has so far, after a failure; they do not replace the rank's part.
  void add(int rank, std::string events, bool complete = true);
  // Writes the available parts at the end of a failed run, unless the file was already written. Rank r > 0 of
  // a run of processes cannot send its part to rank 0, so it writes a separate file: trace.json ->
  // trace.rank3.json. Does not report errors, because the run already reports one.
  void write_rest(const std::string& error) noexcept;

 private:
  std::string document(const std::string& error) const;

  const TrainConfig& config_;
  const int rank_;
  OutputFile file_;
  std::mutex mutex_;
  std::vector<std::string> parts_;  // parts by rank
  std::vector<bool> there_;
  bool written_ = false;
};

}  // namespace gradwire
