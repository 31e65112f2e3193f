// Helpers shared by the schedule builders. Internal to collectives/schedule.
#pragma once

#include "collectives/schedule/transfers.h"

namespace gradwire::detail {

// Returns an allreduce without rounds. owner[c] is the rank that owns chunk c. Every rank is a separate node
// unless the builder sets nodes and per_node. Throws BadInput for a world below 1.
Schedule outline(ScheduleKind kind, int world, std::vector<int32_t> owner);
// Returns the same with `rounds` empty rounds per rank, or without rounds in a world of 1.
Schedule empty_schedule(ScheduleKind kind, int world, std::vector<int32_t> owner, int rounds);
// Returns the topology with the unknown field derived from the world. Throws BadInput if the topology does
// not fit the world.
Topology complete(Topology topology, int world);
// Returns the owners of `world` chunks: rank c owns chunk c.
std::vector<int32_t> one_chunk_each(int world);

// Adds both ends of a transfer of chunk `chunk` to round `round`: a send at `from`, `receive` at `to`.
void add_transfer(Schedule& schedule, int round, int from, int to, int chunk, Step::Kind receive,
                  bool intra_node = false);

// Keeps all transfers.
class ScheduleSink final : public TransferSink {
 public:
  void begin(const Schedule& outline, int rounds) override;
  void add(int round, int from, int to, int chunk, Step::Kind receive, bool intra_node) override {
    add_transfer(schedule, round, from, to, chunk, receive, intra_node);
  }
  Schedule schedule;
};

// Emit the transfers of the functions of schedule.h with the same names.
void emit_ring(int world, TransferSink& sink);
void emit_two_shot(int world, TransferSink& sink);
void emit_double_tree(int world, TransferSink& sink);
void emit_hierarchical(int nodes, int per_node, ScheduleKind between, TransferSink& sink);

}  // namespace gradwire::detail
