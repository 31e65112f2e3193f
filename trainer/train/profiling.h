// One rank's side of --trace and --trace-steps.
#pragma once

#include <optional>
#include <string>

#include "collectives/agreement/statements.h"
#include "collectives/communicator/communicator.h"
#include "collectives/reducer/reducer.h"
#include "runtime/trace/trace.h"
#include "trainer/config/config.h"
#include "trainer/log/trace_file.h"
#include "trainer/train/training_marks.h"

namespace gradwire {

// Starts CUDA's profiler before the first step of --trace-steps, and stops it after the last.
// Call before each step, and once after the last step of the run.
void profile(const TrainConfig& config, Communicator& comm, const Stream& stream, int64_t step);

// --trace: collects the spans of this rank's steps from the marks that the log uses.
class RankTrace {
 public:
  // Prepares the trace. `file`: null without --trace; the class then does nothing. `instant`: time 0 of the
  // trace.
  RankTrace(const TrainConfig& config, Communicator& comm, TraceFile* file, const SharedInstant& instant);

  // Returns the sink for spans within the phases of a step; null without --trace.
  Tracer* tracer() { return tracer_ ? &*tracer_ : nullptr; }
  // Adds the spans of a finished step, which ended at `end`. The last traced step sends all spans to the
  // trace file.
  void add(const TrainingMarks& marks, const Event& end, const std::string& row, const Reducer& reducer);
  // Adds the spans to the trace file after a failure, unless they were already added.
  void keep();

 private:
  std::string text();
  void send_spans();

  const TrainConfig& config_;
  Communicator& comm_;
  TraceFile* const file_;
  const SharedInstant instant_;
  std::optional<Tracer> tracer_;
};

}  // namespace gradwire
