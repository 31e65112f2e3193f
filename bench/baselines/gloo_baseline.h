// Gloo's own allreduce of floats between the same processes, as a baseline.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "collectives/communicator/communicator.h"

namespace gradwire::bench {

class GlooBaseline {
 public:
  // Collective. `address` is this machine's address as the other ranks reach it.
  GlooBaseline(Communicator& comm, const Stream& stream, const std::string& address, double timeout_s);
  ~GlooBaseline();

  // Microseconds per sum of `count` floats, mean of `iterations` after `warmup`. Collective.
  double time_us(int64_t count, int warmup, int iterations);

  // False in a build without Gloo.
  static bool available();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// This machine's local address on the route to the rendezvous.
std::string address_towards(const std::string& rendezvous);

}  // namespace gradwire::bench
