// NCCL's own allreduce of floats, among the same processes, to compare ours with.
#pragma once

#include <cstdint>
#include <memory>

#include "collectives/communicator/communicator.h"

namespace gradwire::bench {

class NcclPeer {
 public:
  // Collective: a communicator of its own among the ranks of `comm`, whose device is a GPU.
  NcclPeer(Communicator& comm, const Stream& stream);
  ~NcclPeer();

  // Microseconds per sum of `count` floats in place, mean of `iterations` after `warmup`, of the slowest
  // rank. Collective.
  double time_us(int64_t count, int warmup, int iterations);

  // False in a build without the NCCL transport; then there is no peer to be made.
  static bool available();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace gradwire::bench
