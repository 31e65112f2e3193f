// The file of --trace: the spans of all ranks in the trace event format, which Perfetto and chrome://tracing
// read. A process per rank, a thread per stream. docs/profiling.md describes it.
#pragma once

#include <mutex>
#include <string>
#include <vector>

#include "runtime/trace.h"
#include "trainer/config/config.h"

namespace gradwire {

// One rank's spans as a comma-separated list of events; "" for none. `error_us`: how far its clock may be
// off.
std::string trace_events(int rank, Device device, std::vector<TraceSpan> spans, size_t dropped,
                         double error_us);

// Collects the ranks' parts, and writes them in one piece: a reader sees a whole file or none.
class TraceFile {
 public:
  TraceFile(const TrainConfig& config, std::string path);

  // Any thread. When the last rank's part has come, the file is written. Throws Error when that fails.
  void add(int rank, std::string events);
  // Of a run that failed: what a rank has so far. Does nothing where its part has come.
  void keep(int rank, std::string events);
  // At the end of a run that failed: writes what there is, unless all had come. Throws nothing: there is an
  // error already.
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

// trace.json -> trace.rank3.json: where a rank that is a process of its own leaves what it could not hand to
// rank 0.
std::string trace_path_of_rank(const std::string& path, int rank);

}  // namespace gradwire
