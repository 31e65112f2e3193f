// NCCL's allreduce of floats between the same processes, as a baseline.
#pragma once

#include <cstdint>
#include <memory>

#include "collectives/communicator/communicator.h"

namespace gradwire::bench {

class NcclBaseline {
 public:
  // Creates a separate NCCL communicator among the ranks of `comm`, whose device must be a GPU. Collective.
  NcclBaseline(Communicator& comm, const Stream& stream);
  ~NcclBaseline();

  // Returns the microseconds of a sum of `count` floats in place on the slowest rank: mean of `iterations`
  // after `warmup`. Collective.
  double time_us(int64_t count, int warmup, int iterations);

  // Returns false in a build without the NCCL transport.
  static bool available();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace gradwire::bench
