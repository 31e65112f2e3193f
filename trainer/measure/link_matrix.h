// Latency and bandwidth between each pair of ranks, measured one pair at a time.
#pragma once

#include <vector>

#include "collectives/communicator/communicator.h"

namespace gradwire {

struct LinkMatrix {
  struct Link {
    double latency_us = 0;  // of 64 bytes in both directions at the same time
    double gb_per_s = 0;    // bandwidth in each direction, with traffic in both directions
  };
  int world = 0;
  std::vector<Link> links;  // [a * world + b], symmetric

  const Link& between(int a, int b) const { return links[static_cast<size_t>(a * world + b)]; }
};

// Measures all pairs. Collective; blocks for about 50 ms per pair on any link. `costs` determines the message
// sizes and must be the same on every rank. Every rank returns the same values.
LinkMatrix measure_link_matrix(Communicator& comm, const Stream& stream, const LinkCosts& costs);

}  // namespace gradwire
