// NCCL's own allreduce of floats between the same processes, as a baseline.
#pragma once

#include <cstdint>
#include <memory>

#include "collectives/communicator/communicator.h"

namespace gradwire::bench {

class NcclBaseline {
 public:
  // Collective: makes its own NCCL communicator among the ranks of `comm`, whose device must be a GPU.
  NcclBaseline(Communicator& comm, const Stream& stream);
  ~NcclBaseline();

  // Microseconds per sum of `count` floats in place, mean of `iterations` after `warmup`, of the slowest
  // rank. Collective.
  double time_us(int64_t count, int warmup, int iterations);

  // False in a build without the NCCL transport.
  static bool available();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace gradwire::bench
