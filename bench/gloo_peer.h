// Gloo's own allreduce of floats, among the same processes, to compare ours with.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "collectives/communicator/communicator.h"

namespace gradwire::bench {

class GlooPeer {
 public:
  // Collective. `address` is this machine's, under which the others reach it.
  GlooPeer(Communicator& comm, const Stream& stream, const std::string& address, double timeout_s);
  ~GlooPeer();

  // Microseconds per sum of `count` floats, mean of `iterations` after `warmup`. Collective.
  double time_us(int64_t count, int warmup, int iterations);

  // False in a build without Gloo; then there is no peer to be made.
  static bool available();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// The address of this machine that traffic to the other ranks leaves from, given where they meet.
std::string address_towards(const std::string& rendezvous);

}  // namespace gradwire::bench
