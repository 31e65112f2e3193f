// Gloo's allreduce of floats between the same processes, as a baseline.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "collectives/communicator/communicator.h"

namespace gradwire::bench {

class GlooBaseline {
 public:
  // `address`: this machine's address as seen by the other ranks. Collective.
  GlooBaseline(Communicator& comm, const Stream& stream, const std::string& address, double timeout_s);
  ~GlooBaseline();

  // Returns the microseconds of a sum of `count` floats: mean of `iterations` after `warmup`. Collective.
  double time_us(int64_t count, int warmup, int iterations);

  // Returns false in a build without Gloo.
  static bool available();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// Returns this machine's local address on the route to the rendezvous.
std::string address_towards(const std::string& rendezvous);

}  // namespace gradwire::bench
