// The compressed allreduce on somebody else's NCCL communicator, as the interposer needs it.
#pragma once

#include <nccl.h>

#include <memory>
#include <optional>
#include <string>
#include <tuple>

#include "collectives/communicator/communicator.h"
#include "collectives/plan/planner.h"
#include "collectives/program/cache.h"
#include "integrations/nccl/decide.h"

namespace gradwire::interposer {

// One communicator's. Calls come one at a time, as NCCL demands of its users.
//
// Error feedback belongs to a place in memory: a residual is kept for each (send buffer, receive buffer,
// count, operation), which for training frameworks is a gradient bucket. The kPlaces used last are kept; a
// place that comes back later starts without a residual. Residuals never decide whether a call is compressed,
// so ranks may differ in them.
class CompressedAllReduce {
 public:
  // Adopts `comm` and compares settings with the other ranks. Collective, blocks.
  CompressedAllReduce(ncclComm_t comm, int device, const Settings& settings);

  // All ranks said the same, and something is to be done.
  bool usable() const { return usable_; }
  // What the log says about this communicator.
  const std::string& description() const { return description_; }
  int rank() const { return comm_->rank(); }

  void run(const float* send, float* receive, int64_t count, ncclRedOp_t op, cudaStream_t stream);

  static constexpr size_t kPlaces = 256;

 private:
  using Key = std::tuple<const float*, float*, int64_t, ncclRedOp_t>;
  Program& program_for(const Key& key);

  const Settings settings_;
  const int device_;
  std::unique_ptr<Communicator> comm_;
  bool usable_ = false;
  std::string description_;
  Stream setup_;
  std::optional<SchedulePlanner> planner_;
  Buffer step_;
  Event last_;  // of the call before: they share the workspace
  ProgramCache<Key> programs_;
};

}  // namespace gradwire::interposer
