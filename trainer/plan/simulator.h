// An event-driven simulation of a schedule on the links of a cluster.
//
// The rules of schedule.h hold: a rank starts a round when its previous round is done, and a message starts
// when both ends are in its round. A message then takes the latency of its path, and after that moves at the
// smallest share of any link on the path. The messages on a link share its bandwidth equally.
#pragma once

#include "trainer/plan/fabric.h"
#include "trainer/plan/flow_rounds.h"

namespace gradwire {

// Returns the time until the last rank has finished, in microseconds, for a buffer of `bytes` bytes on the
// wire, or of `intra_node_bytes` on links that a hierarchical schedule marks as inside a node. Very many
// equal rounds are extrapolated: once every rank waits for the slowest link, each round takes the same time.
double simulate_us(const FlowRounds& rounds, const Fabric& fabric, double bytes, double intra_node_bytes);
// Does the same, and simulates every round.
double simulate_every_round_us(const FlowRounds& rounds, const Fabric& fabric, double bytes,
                               double intra_node_bytes);

// Returns the fraction of the buffer that each of the simulated ranks sends on each level,
// [level of Fabric::levels()][rank]. A message counts on every level that it enters.
std::vector<std::vector<double>> sent_by_level(const FlowRounds& rounds, const Fabric& fabric);

}  // namespace gradwire
