// Gloo's own allreduce of floats, among the same processes, to compare ours with.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "collectives/communicator/communicator.h"

namespace gradwire::bench {

class GlooBaseline {
 public:
  // Collective. `address` is this machine's, under which the others reach it.
  GlooBaseline(Communicator& comm, const Stream& stream, const std::string& address, double timeout_s);
  ~GlooBaseline();

  // Microseconds per sum of `count` floats, mean of `iterations` after `warmup`. Collective.
  double time_us(int64_t count, int warmup, int iterations);

  // False in a build without Gloo; then there is nothing to compare with.
  static bool available();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// The address of this machine that traffic to the other ranks leaves from, given where they meet.
std::string address_towards(const std::string& rendezvous);

}  // namespace gradwire::bench
