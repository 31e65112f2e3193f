// What each pair of ranks has between it, measured one pair at a time.
#pragma once

#include <vector>

#include "collectives/communicator/communicator.h"

namespace gradwire {

struct LinkMatrix {
  struct Link {
    double latency_us = 0;  // of 64 bytes there and, at the same time, 64 back
    double gb_per_s = 0;    // each way, both ways at the same time
  };
  int world = 0;
  std::vector<Link> links;  // [a * world + b], symmetric

  const Link& between(int a, int b) const { return links[static_cast<size_t>(a * world + b)]; }
};

// Collective, and blocks the caller: some 50 ms per pair, whatever the link. `costs`, the same on every rank,
// say how much to send. Every rank returns the same.
LinkMatrix measure_link_matrix(Communicator& comm, const Stream& stream, const LinkCosts& costs);

}  // namespace gradwire
