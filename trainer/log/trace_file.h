// The file of --trace: the spans of all ranks in the trace event format of Perfetto and chrome://tracing,
// with a process per rank and a thread per stream. docs/profiling.md describes it.
#pragma once

#include <mutex>
#include <string>
#include <vector>

#include "runtime/output_file.h"
#include "runtime/trace.h"
#include "trainer/config/config.h"

namespace gradwire {

// One rank's spans as a comma-separated list of events; "" for none. `error_us`: bound on its clock's error.
std::string trace_events(int rank, Device device, std::vector<TraceSpan> spans, size_t dropped,
                         double error_us);

// Collects the ranks' parts and writes them (runtime/output_file.h). A trace that cannot be written does not end the run:
// lose_output() reports it.
class TraceFile {
 public:
  // Decides how config.trace will be written, where `rank` is 0; other ranks have files of their own. Throws BadInput if
  // that is impossible.
  explicit TraceFile(const TrainConfig& config, int rank = 0);

  // From any thread. The last rank's part writes the file.
  void add(int rank, std::string events);
  // After a failure: the spans that a rank has so far. Ignored if its part was already added.
  void keep(int rank, std::string events);
  // At the end of a failed run: writes what there is, unless the file was already written. Rank r > 0 of a run of
  // processes, which could not send its part to rank 0, writes a file of its own: trace.json -> trace.rank3.json. Reports
  // nothing, because there is an error to report already.
  void write_rest(const std::string& error) noexcept;

 private:
  std::string document(const std::string& error) const;

  const TrainConfig& config_;
  const int rank_;
  OutputFile file_;
  std::mutex mutex_;
  std::vector<std::string> parts_;  // by rank
  std::vector<bool> there_;
  bool written_ = false;
};

}  // namespace gradwire
