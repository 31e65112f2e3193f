// The file of --trace: the spans of all ranks in the trace event format of Perfetto and chrome://tracing,
// with a process per rank and a thread per stream. docs/profiling.md describes it.
#pragma once

#include <mutex>
#include <string>
#include <vector>

#include "runtime/trace.h"
#include "trainer/config/config.h"

namespace gradwire {

// One rank's spans as a comma-separated list of events; "" for none. `error_us`: bound on its clock's error.
std::string trace_events(int rank, Device device, std::vector<TraceSpan> spans, size_t dropped,
                         double error_us);

// Collects the ranks' parts and writes them atomically: a reader sees a complete file or none.
class TraceFile {
 public:
  TraceFile(const TrainConfig& config, std::string path);

  // From any thread. The last rank's part writes the file. Throws Error when that fails.
  void add(int rank, std::string events);
  // After a failure: the spans that a rank has so far. Ignored if its part was already added.
  void keep(int rank, std::string events);
  // At the end of a failed run: writes what there is, unless the file was already written. Does not throw,
  // because there is an error to report already.
  void write_rest(const std::string& error) noexcept;

 private:
  std::string document(const std::string& error) const;

  const TrainConfig& config_;
  const std::string path_;
  std::mutex mutex_;
  std::vector<std::string> parts_;  // by rank
  std::vector<bool> there_;
  bool written_ = false;
};

// trace.json -> trace.rank3.json: where a rank that is a process writes what it could not send to rank 0.
std::string trace_path_of_rank(const std::string& path, int rank);

}  // namespace gradwire
