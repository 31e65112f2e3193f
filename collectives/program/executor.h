// Executes a program's plan. Internal to collectives/program.
#pragma once

#include <vector>

#include "collectives/program/compiler.h"
#include "collectives/program/program.h"

namespace gradwire {

// Executes sends and receives overlapped with kernels. Exchanges are posted as early as their data allows,
// and kernels wait only for the exchanges that the kernels depend on. If the plan uses the library, calls the
// transport's allreduce instead.
class ProgramExecutor {
 public:
  // Prepares the execution with these addresses. The plan must outlive the executor.
  ProgramExecutor(const ProgramPlan& plan, const ProgramMemory& memory);

  // Sets the addresses. No run may be in flight.
  void bind(const ProgramMemory& memory);
  // Enqueues the program; later work on `stream` sees the result. Kernels run on `stream`. Exchanges run on
  // the plan's stream for transfers, or on `stream` if the plan does not overlap exchanges with kernels.
  void run(const Stream& stream, BucketPhases* phases);

  size_t workspace_bytes() const { return program_.workspace_bytes; }
  const ProgramInfo& info() const { return info_; }

 private:
  // One run: its streams, and the numbers of exchanges started and finished.
  class Run;

  void call_library(const Stream& stream) const;
  void enter(BucketPhases* phases, const Stream& stream, Phase phase) const;
  // Makes `later` wait for all work enqueued so far on `earlier`.
  void order(const Stream& earlier, const Stream& later);
  int exchanges_per_span() const;
  void label_spans(int bucket);

  const ProgramPlan& plan_;
  ProgramInfo info_;
  ProgramMemory memory_;
  CompiledProgram program_;            // empty if the plan uses the library
  Event begun_, ordered_;              // if overlapped
  std::vector<Event> exchange_done_;   // [exchange], if overlapped
  std::vector<TraceLabelPtr> labels_;  // [span]; created when first traced
};

}  // namespace gradwire
