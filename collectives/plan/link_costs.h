// What a round of transfers costs between these ranks: what schedule=auto decides by.
//
// Schedules load links in four patterns, and what a link gives depends on the pattern (a switch, a shared
// network card, a bus). So each pattern is measured as it is used: all ranks at once. A round in which each
// rank sends `bytes` in a pattern takes latency_us + bytes / bytes_per_us.
#pragma once

#include <string>

#include "collectives/transport/transport.h"

namespace gradwire {

struct LinkCosts {
  // The defaults are what threads of one process see on a typical host: good enough where memory is the link,
  // and the same in every run.
  struct Pattern {
    double latency_us = 20;
    double bytes_per_us = 4000;
    bool operator==(const Pattern&) const = default;
  };
  Pattern neighbour;   // rank r to r + 1: rounds of a ring, about those of a tree
  Pattern all_pairs;   // everybody to everybody: two-shot
  Pattern intra_node;  // ranks of a node to each other; as all_pairs where nodes are not known
  Pattern inter_node;  // ranks with the same place in their nodes to each other; likewise
  bool measured = false;

  bool operator==(const LinkCosts&) const = default;
  // "to a neighbour 31 us and 1.10 GB/s, to all 45 us and 0.93 GB/s, ..."
  std::string to_string() const;
};

// Collective, and blocks the caller: a few dozen small exchanges and a few of 2 MiB per rank and pattern, a
// tenth of a second at 1 Gb/s. Every rank returns the same numbers: the slowest rank's. `stream`: where the
// exchanges run.
LinkCosts measure_link_costs(Transport& transport, const Stream& stream, int ranks_per_node);

}  // namespace gradwire
