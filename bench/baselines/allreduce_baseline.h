// An allreduce of floats by another library between the same processes, as a baseline.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "collectives/communicator/communicator.h"

namespace gradwire::bench {

class AllreduceBaseline {
 public:
  virtual ~AllreduceBaseline() = default;
  // Returns the microseconds of an allreduce of `count` floats on this rank: the mean of `iterations` calls
  // after `warmup` calls. Collective.
  virtual double time_us(int64_t count, int warmup, int iterations) = 0;
};

// Return the baseline among the ranks of `comm`, or null in a build without the library. Collective.
// `address`: this machine's address as seen by the other ranks.
std::unique_ptr<AllreduceBaseline> make_gloo_baseline(Communicator& comm, const Stream& stream,
                                                      const std::string& address, double timeout_s);
// Requires that the device of `comm` is a GPU.
std::unique_ptr<AllreduceBaseline> make_nccl_baseline(Communicator& comm, const Stream& stream);

// Returns this machine's local address on the route to the rendezvous.
std::string address_towards(const std::string& rendezvous);

}  // namespace gradwire::bench
