// The costs of rounds of transfers between the ranks of a group, from which schedule=auto chooses.
//
// Schedules load links in four patterns, and the throughput of a link depends on the pattern (a switch, a
// shared network card, a bus). So each pattern is measured as schedules use the pattern: all ranks at once. A
// round in which each rank sends `bytes` in a pattern takes latency_us + bytes / bytes_per_us.
#pragma once

#include <chrono>
#include <string>

#include "collectives/transport/transport.h"

namespace gradwire {

struct LinkCosts {
  // The cost of a round in one pattern. The defaults are typical of threads of one process, and the same in
  // every run.
  struct Pattern {
    double latency_us = 20;
    double bytes_per_us = 4000;
    bool operator==(const Pattern&) const = default;
  };
  Pattern neighbour = {};   // rank r to r + 1: the rounds of a ring and, roughly, of a tree
  Pattern all_pairs = {};   // every rank to every other rank: the rounds of a two-shot
  Pattern intra_node = {};  // ranks of a node to each other; all_pairs if nodes are unknown
  Pattern inter_node = {};  // ranks with the same local index to each other; all_pairs if nodes are unknown
  bool measured = false;
  // The longest message that a schedule cuts a buffer into if the costs are not measured.
  int64_t slice_bytes = 2 << 20;
  // The cost of NCCL's allreduce of a buffer of S bytes by n ranks: latency_us + 2 (n-1)/n S / bytes_per_us.
  // Measured if the transport has an allreduce.
  Pattern library = {};
  bool library_measured = false;

  bool operator==(const LinkCosts&) const = default;
  // Returns a text such as "to a neighbour 31 us and 1.10 GB/s, to all 45 us and 0.93 GB/s, ...".
  std::string to_string() const;
};

// Measures the links, and the transport's allreduce if the transport has one, with exchanges of growing
// sizes: from 1 KiB per rank to `max_bytes`, or as far as the slowest rank comes within `limit` for all
// patterns together; some round trips, and the setup of connections, are extra. `limit` and `max_bytes` must
// be the same on all ranks; a `max_bytes` of 0 stands for 64 MiB between GPUs and 2 MiB on the host. Events
// measure the time, so that the host's work counts only if that work takes longer than the transfers. Returns
// the slowest rank's numbers on every rank. The exchanges run on `stream`. Collective; blocks.
LinkCosts measure_link_costs(Transport& transport, const Stream& stream, int ranks_per_node,
                             std::chrono::milliseconds limit, size_t max_bytes = 0);

}  // namespace gradwire
