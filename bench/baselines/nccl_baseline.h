// NCCL's own allreduce of floats, among the same processes, to compare ours with.
#pragma once

#include <cstdint>
#include <memory>

#include "collectives/communicator/communicator.h"

namespace gradwire::bench {

class NcclBaseline {
 public:
  // Collective: a communicator of its own among the ranks of `comm`, whose device is a GPU.
  NcclBaseline(Communicator& comm, const Stream& stream);
  ~NcclBaseline();

  // Microseconds per sum of `count` floats in place, mean of `iterations` after `warmup`, of the slowest
  // rank. Collective.
  double time_us(int64_t count, int warmup, int iterations);

  // False in a build without the NCCL transport; then there is nothing to compare with.
  static bool available();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace gradwire::bench
