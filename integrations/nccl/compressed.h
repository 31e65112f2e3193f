// The compressed allreduce on somebody else's NCCL communicator, as the interposer needs it.
#pragma once

#include <nccl.h>

#include <list>
#include <memory>
#include <mutex>
#include <string>

#include "collectives/communicator/communicator.h"
#include "collectives/program/executor.h"
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
  struct Place {
    const float* send = nullptr;
    float* receive = nullptr;
    int64_t count = 0;
    ncclRedOp_t op = ncclSum;
    Buffer residual;
    std::unique_ptr<Allreduce> program;
    bool is(const float* s, float* r, int64_t n, ncclRedOp_t o) const {
      return send == s && receive == r && count == n && op == o;
    }
  };
  Place& place_for(const float* send, float* receive, int64_t count, ncclRedOp_t op);

  const Settings settings_;
  const int device_;
  std::unique_ptr<Communicator> comm_;
  bool usable_ = false;
  std::string description_;
  Schedule schedule_;
  Stream setup_;
  Buffer step_, workspace_;
  Event last_;               // of the call before: they share the workspace
  std::list<Place> places_;  // used last comes first
  int64_t state_bytes_ = 0;
};

}  // namespace gradwire::interposer
