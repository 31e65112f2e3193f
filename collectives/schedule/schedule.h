// Schedules are data: for each rank, rounds of transfers that make up a collective. A schedule touches
// neither memory nor wire formats. Program runs all schedules, the checker proves them, and the planner
// predicts their cost.
//
// The buffer is cut into `chunks` parts, each owned by one rank. In each round a rank's transfers progress
// together, as in an NCCL group. A round starts when the previous round is done on this rank. Kinds of step:
//   send c to p              this rank's value of chunk c: its partial sum, or the final value
//   recv_reduce c from p     a contribution, added to this rank's partial sum of c
//   recv_copy c from p       the final value of c
// A rank's first send of c closes its partial sum of c: nothing may be added after that. A sum closed by the
// owner of c is final. The collectives differ in where they begin and end:
//   allreduce        every rank begins with a part of every chunk and ends with every final value
//   reduce_scatter   begins the same way; ends with each owner holding the final value of its chunks
//   all_gather       begins where reduce_scatter ends, and ends where allreduce does
//   broadcast        an all_gather in which one rank, the root, owns every chunk
//
// Summation order is part of a schedule's meaning: when a partial sum is closed, its parts are added in FP32
// in ascending order of the source rank, including this rank's own part.
//
// Within a round order does not matter, except that transfers between the same two ranks match in order. Sent
// values were complete before the round began. In one round a rank does only one kind of step to a chunk (any
// number of sends, any number of recv_reduce, or one recv_copy). Both ends of a transfer are in the same
// round of their ranks, so round k of all ranks is one closed exchange and no round can deadlock.
//
// The checker (checker.h) proves these properties for a given schedule.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace gradwire {

enum class Collective : uint8_t { allreduce, reduce_scatter, all_gather, broadcast };
// The arrangement of transfers; schedule.cpp has a row for each. `automatic`: the planner (collectives/plan)
// chooses another kind. `nccl`: NCCL arranges them.
enum class ScheduleKind : uint8_t { automatic, ring, tree, two_shot, hierarchical, nccl };

const char* name(Collective collective);
const char* name(ScheduleKind kind);  // the name in specs: "auto", "ring", ...
// Returns the kinds whose transfers are known: all but `automatic` and `nccl`.
const std::vector<ScheduleKind>& all_schedules();
bool has_broadcast(ScheduleKind kind);
// Returns the largest world that an allreduce of this kind serves.
int max_world(ScheduleKind kind);

struct Step {
  enum class Kind : uint8_t { send, recv_reduce, recv_copy };
  Kind kind = Kind::send;
  int32_t peer = 0;
  int32_t chunk = 0;
  // Whether the link is inside a node, where bytes are cheap. Hierarchical schedules mark these links so that
  // the wire format can be limited to links between nodes. Always false in other schedules.
  bool intra_node = false;
  bool operator==(const Step&) const = default;
};

using Round = std::vector<Step>;

// The placement of ranks on nodes; 0: unknown. One field and the world determine the other field.
struct Topology {
  int nodes = 0;
  int per_node = 0;
};

struct Schedule {
  Collective collective = Collective::allreduce;
  ScheduleKind kind = ScheduleKind::ring;
  int world = 1;
  int chunks = 1;
  std::vector<int32_t> owner;  // [chunk]
  // The largest number of roundings of an element on its way into the result: with a lossy format on every
  // link, or only on links between nodes.
  int lossy_steps = 0;
  int inter_node_lossy_steps = 0;
  // Hierarchical: rank = node * per_node + local index. Otherwise every rank counts as a node.
  int nodes = 1;
  int per_node = 1;
  // [rank][round]; every rank has the same number of rounds.
  std::vector<std::vector<Round>> rounds;

  int num_rounds() const { return rounds.empty() ? 0 : static_cast<int>(rounds[0].size()); }
};

// Below, S is the size of the whole buffer. Each function's file explains its schedule. The first four are
// allreduces.

// Returns a ring: n chunks, 2 (n-1) rounds, n lossy steps. Each rank sends 2 (n-1)/n S, the minimum.
Schedule ring(int world);

// Returns a two-shot: n chunks, 2 rounds with n (n-1) messages each, 2 lossy steps for any n. Each rank sends
// as many bytes as in the ring.
Schedule two_shot(int world);

// Returns a double binary tree: 2 chunks, 2 floor(log2 n) rounds, floor(log2 n) + 1 lossy steps. Each rank
// sends at most 2 S.
Schedule double_tree(int world);

// Returns a hierarchical schedule: reduce-scatter inside each node, allreduce between ranks of the same local
// index, all-gather inside each node. Each rank sends 2 (n-1)/n S / per_node between n = `nodes` nodes.
// `between`: two_shot or ring.
Schedule hierarchical(int nodes, int per_node, ScheduleKind between = ScheduleKind::two_shot);

// Returns the schedule of NCCL's allreduce, whose transfers are unknown. To count the bytes, the schedule has
// the transfers of a ring, which are never executed.
Schedule nccl_allreduce(int world);

// Return a half of an allreduce: the transfers up to each owner's sum, or the transfers of the final values.
// Rounds that become empty on all ranks are dropped. Throw BadInput for another collective.
Schedule reduce_scatter(const Schedule& allreduce);
Schedule all_gather(const Schedule& allreduce);

// Returns a broadcast from `root` to all ranks: as a chain (ring), through all pairs (two_shot), or entering
// each node once (hierarchical). Each rank but the root receives S, the minimum. broadcast.cpp lists the
// bytes sent. The schedule has one lossy step. Throws BadInput for the kind `tree`, a root that does not
// exist, and a topology that does not match the world.
Schedule broadcast(ScheduleKind kind, int world, int root, Topology topology = {});

// Returns a schedule that runs the given schedule on each of `slices` parts of every chunk. Round k of part i
// is round i + 2 k of the result. The parts share the links. Between two rounds of a part there is a round of
// other parts, during which contributions can be added up, so no round needs data received in the previous
// round. The result has 2 (rounds - 1) + slices rounds of 1/slices the size. With one slice the result is the
// given schedule. Neither sums nor bits change.
Schedule pipelined(const Schedule& schedule, int slices);

// Elements [begin, end) of a buffer.
struct ElementRange {
  int64_t begin = 0, end = 0;
  int64_t count() const { return end - begin; }
  bool operator==(const ElementRange&) const = default;
};
// Returns the range of a chunk when `count` elements are cut into `chunks` parts as evenly as `granularity`
// allows. The slices of a pipelined chunk together are the chunk.
ElementRange chunk_range(int64_t count, int chunks, int chunk, int64_t granularity = 8);

// Numbers of elements of the ranks' shards, (world), chosen by the caller: any size, including 0. Shards lie
// one after another in rank order. Empty: the buffer is cut evenly into chunks.
using Shards = std::vector<int64_t>;
// Returns each chunk's range, (chunks). Given shards, a chunk is a part of its owner's shard, which is cut as
// evenly as `granularity` allows among the owner's chunks. Throws BadInput unless there is one shard per
// rank, they add up to `count`, and every rank with a shard owns a chunk.
std::vector<ElementRange> chunk_ranges(const Schedule& schedule, int64_t count, const Shards& shards,
                                       int64_t granularity = 8);

// Return the number of elements that this rank sends or owns when the schedule runs over `count` elements.
int64_t elements_sent(const Schedule& schedule, int rank, int64_t count, const Shards& shards = {});
int64_t elements_owned(const Schedule& schedule, int rank, int64_t count, int64_t granularity = 8,
                       const Shards& shards = {});

// Returns an allreduce of this kind. Throws BadInput for a kind that does not support this world.
Schedule make_schedule(ScheduleKind kind, int world, Topology topology = {});
// Returns a schedule of this kind for any collective. `root` applies to a broadcast. Throws BadInput also for
// a collective without a schedule of this kind.
Schedule make_schedule(Collective collective, ScheduleKind kind, int world, Topology topology = {},
                       int root = 0);

// The transfers of a schedule one at a time. The schedule of thousands of ranks does not fit in memory: a
// ring of 4,096 ranks has 67 million steps. A sink keeps the part that its user needs. The builders of
// schedule.h emit the same transfers into a sink that keeps all of them.

struct TransferSink {
  // Called once, before add(). `outline`: the schedule without its rounds.
  std::function<void(const Schedule& outline, int rounds)> begin;
  // Adds both ends of a transfer of chunk `chunk`: a send at `from`, `receive` at `to`. Transfers of one
  // round are added in the order in which both ranks do their steps.
  std::function<void(int round, int from, int to, int chunk, Step::Kind receive, bool intra_node)> add;
};

// Passes the transfers of make_schedule(kind, world, topology) to `sink`. Throws BadInput for a kind that
// does not support this world.
void emit_schedule(ScheduleKind kind, int world, Topology topology, const TransferSink& sink);

}  // namespace gradwire

namespace gradwire::detail {

// Helpers shared by the schedule builders. Internal to collectives/schedule.

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

// Returns the schedule of all transfers that `emit` passes to the sink.
Schedule collect(const std::function<void(const TransferSink& sink)>& emit);

// Emit the transfers of the functions of schedule.h with the same names.
void emit_ring(int world, const TransferSink& sink);
void emit_two_shot(int world, const TransferSink& sink);
void emit_double_tree(int world, const TransferSink& sink);
void emit_hierarchical(int nodes, int per_node, ScheduleKind between, const TransferSink& sink);

}  // namespace gradwire::detail
