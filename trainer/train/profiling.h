// One rank's side of --trace and --profile-steps.
#pragma once

#include <optional>
#include <string>

#include "collectives/agreement/shared_clock.h"
#include "collectives/communicator/communicator.h"
#include "collectives/reducer/reducer.h"
#include "runtime/trace.h"
#include "trainer/config/config.h"
#include "trainer/log/trace_file.h"
#include "trainer/train/training_marks.h"

namespace gradwire {

// --profile-steps: starts a profiler in front of its first step, and stops it after its last. Call it in front
// of each step, and after the last.
void profile(const TrainConfig& config, Communicator& comm, const Stream& stream, int64_t step);

// --trace: spans of this rank's steps, from the marks that the log needs anyway.
class RankTrace {
 public:
  // `file`: null without --trace; then nothing is done. `instant`: time 0 of the trace.
  RankTrace(const TrainConfig& config, Communicator& comm, TraceFile* file, const SharedInstant& instant);

  // Who is told of spans finer than those; null without --trace.
  Tracer* tracer() { return tracer_ ? &*tracer_ : nullptr; }
  // Puts a step that is done, at `end`, into the trace. After its last step all of it is handed over.
  void add(const TrainingMarks& marks, const Event& end, const std::string& row, const Reducer& reducer);
  // Of a run that has failed: gives the trace file what has not been handed over.
  void keep();

 private:
  std::string text();
  void hand_over();

  const TrainConfig& config_;
  Communicator& comm_;
  TraceFile* const file_;
  const SharedInstant instant_;
  std::optional<Tracer> tracer_;
};

}  // namespace gradwire
