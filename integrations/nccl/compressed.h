// The interposer's compressed allreduce, on the program's NCCL communicator.
#pragma once

#include <nccl.h>

#include <memory>
#include <optional>
#include <string>
#include <tuple>

#include "collectives/communicator/communicator.h"
#include "collectives/plan/planner.h"
#include "collectives/program/program.h"
#include "integrations/nccl/decide.h"

namespace gradwire::interposer {

// The compressed allreduce of one communicator. Calls must not be concurrent, as NCCL requires.
//
// Error feedback is tied to memory addresses: there is a residual for each (send buffer, receive buffer,
// count, operation), which in training frameworks is a gradient bucket. The cache has the programs and
// residuals of the kMaxPrograms most recent buckets. Residuals do not affect whether a call is compressed, so
// residuals may differ between ranks.
class CompressedAllReduce {
 public:
  // Adopts `comm` and compares settings with the other ranks. Collective; blocks.
  CompressedAllReduce(ncclComm_t comm, int device, const Settings& settings);
  ~CompressedAllReduce();

  // Returns whether all ranks have the same settings, and the settings allow compression.
  bool usable() const { return usable_; }
  // Returns a line for the log that describes the compression of this communicator's calls.
  const std::string& description() const { return description_; }
  int rank() const { return comm_->rank(); }

  void run(const float* send, float* receive, int64_t count, ncclRedOp_t op, cudaStream_t stream);

  static constexpr size_t kMaxPrograms = 256;

 private:
  using Key = std::tuple<const float*, float*, int64_t, ncclRedOp_t>;
  Program& program_for(const Key& key, const Stream& stream);

  const Settings settings_;
  const int device_;
  std::unique_ptr<Communicator> comm_;
  bool usable_ = false;
  std::string description_;
  Stream setup_;
  std::optional<SchedulePlanner> planner_;
  Buffer step_;
  Event last_;   // end of the previous call; all calls share the workspace
  Event ready_;  // recorded once a new program's memory is allocated
  ProgramCache<Key> programs_;
};

}  // namespace gradwire::interposer
