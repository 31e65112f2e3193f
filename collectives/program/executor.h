// Executors: each carries out a plan in one way. Internal to collectives/program.
#pragma once

#include <memory>

#include "collectives/program/program_plan.h"

namespace gradwire {

class ProgramExecutor {
 public:
  virtual ~ProgramExecutor() = default;

  // Sets the addresses. No run may be in flight.
  virtual void bind(const ProgramMemory& memory) = 0;
  // Enqueues the program; later work on `stream` sees the result.
  void run(const Stream& stream, BucketPhases* phases);

  size_t workspace_bytes() const { return workspace_bytes_; }
  const ProgramInfo& info() const { return info_; }

 protected:
  explicit ProgramExecutor(const ProgramPlan& plan);
  // Enqueues kernels on `stream` and exchanges on `transfers`, which is `stream` unless the plan overlaps
  // exchanges with kernels.
  virtual void enqueue(const Stream& stream, const Stream& transfers, BucketPhases* phases) = 0;
  void enter(BucketPhases* phases, const Stream& stream, Phase phase) const;
  // Makes `later` wait for all work enqueued so far on `earlier`.
  void order(const Stream& earlier, const Stream& later);

  const ProgramPlan& plan_;
  ProgramInfo info_;
  size_t workspace_bytes_ = 0;

 private:
  Event begun_, ordered_;
};

// An executor whose operations all run on the stream for transfers, without overlap.
class SerialExecutor : public ProgramExecutor {
 protected:
  using ProgramExecutor::ProgramExecutor;
  virtual void enqueue_on(const Stream& stream) = 0;

 private:
  void enqueue(const Stream& stream, const Stream& transfers, BucketPhases* phases) final;
};

// Returns the executor for the plan's execution, bound to `memory`. The plan must outlive the executor.
std::unique_ptr<ProgramExecutor> make_executor(const ProgramPlan& plan, const ProgramMemory& memory);
std::unique_ptr<ProgramExecutor> make_message_executor(const ProgramPlan& plan, const ProgramMemory& memory);

}  // namespace gradwire
