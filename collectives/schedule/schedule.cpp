#include "collectives/schedule/schedule.h"

#include <algorithm>
#include <iterator>
#include <limits>
#include <numeric>

#include "kernels/wire/format.h"
#include "runtime/util/error.h"

namespace gradwire {

const char* name(Collective collective) {
  constexpr const char* kNames[] = {"allreduce", "reduce-scatter", "all-gather", "broadcast"};
  return kNames[static_cast<size_t>(collective)];
}

namespace {

// Emits a hierarchical schedule. With very many nodes, the nodes form a ring, because each step of a ring
// adds a single message.
void emit_nodes(int world, Topology topology, const TransferSink& sink) {
  const Topology t = detail::complete(topology, world);
  const bool straight = t.nodes + t.per_node - 2 <= kMaxInputs;
  detail::emit_hierarchical(t.nodes, t.per_node, straight ? ScheduleKind::two_shot : ScheduleKind::ring,
                            sink);
}

template <void (*kEmit)(int world, const TransferSink& sink)>
void emit_flat(int world, Topology, const TransferSink& sink) {
  kEmit(world, sink);
}

constexpr int kAnyWorld = std::numeric_limits<int>::max();

// The kinds, in the order of ScheduleKind. emit: null if the transfers are unknown.
struct KindRow {
  const char* name;
  void (*emit)(int world, Topology topology, const TransferSink& sink);
  bool has_broadcast;
  int max_world;
};
constexpr KindRow kKinds[] = {{"auto", nullptr, true, kAnyWorld},
                              {"ring", emit_flat<detail::emit_ring>, true, kAnyWorld},
                              {"tree", emit_flat<detail::emit_double_tree>, false, kAnyWorld},
                              {"two_shot", emit_flat<detail::emit_two_shot>, true, kMaxInputs + 1},
                              {"hierarchical", emit_nodes, true, kAnyWorld},
                              {"nccl", nullptr, false, kAnyWorld}};

const KindRow& row(ScheduleKind kind) {
  return kKinds[static_cast<size_t>(kind)];
}

}  // namespace

const char* name(ScheduleKind kind) {
  return row(kind).name;
}

const std::vector<ScheduleKind>& all_schedules() {
  static const std::vector<ScheduleKind> kAll = [] {
    std::vector<ScheduleKind> all;
    for (size_t kind = 0; kind < std::size(kKinds); ++kind) {
      if (kKinds[kind].emit != nullptr) all.push_back(static_cast<ScheduleKind>(kind));
    }
    return all;
  }();
  return kAll;
}

bool has_broadcast(ScheduleKind kind) {
  return row(kind).has_broadcast;
}

int max_world(ScheduleKind kind) {
  return row(kind).max_world;
}

namespace detail {

Schedule outline(ScheduleKind kind, int world, std::vector<int32_t> owner) {
  if (world < 1) throw BadInput("a schedule needs at least 1 rank, got {}", world);
  Schedule s;
  s.kind = kind;
  s.world = world;
  s.chunks = static_cast<int>(owner.size());
  s.owner = std::move(owner);
  s.nodes = world;
  return s;
}

Schedule empty_schedule(ScheduleKind kind, int world, std::vector<int32_t> owner, int rounds) {
  Schedule s = outline(kind, world, std::move(owner));
  s.rounds.assign(world, std::vector<Round>(world == 1 ? 0 : rounds));
  return s;
}

Schedule collect(const std::function<void(const TransferSink& sink)>& emit) {
  Schedule schedule;
  emit(
      {.begin =
           [&](const Schedule& outline, int rounds) {
             schedule = outline;
             schedule.rounds.assign(outline.world, std::vector<Round>(outline.world == 1 ? 0 : rounds));
           },
       .add = [&](int round, int from, int to, int chunk, Step::Kind receive,
                  bool intra_node) { add_transfer(schedule, round, from, to, chunk, receive, intra_node); }});
  return schedule;
}

std::vector<int32_t> one_chunk_each(int world) {
  std::vector<int32_t> owner(std::max(world, 0));
  std::iota(owner.begin(), owner.end(), 0);
  return owner;
}

void add_transfer(Schedule& schedule, int round, int from, int to, int chunk, Step::Kind receive,
                  bool intra_node) {
  schedule.rounds[from][round].push_back({Step::Kind::send, to, chunk, intra_node});
  schedule.rounds[to][round].push_back({receive, from, chunk, intra_node});
}

}  // namespace detail

namespace {

// Returns the transfers of an allreduce whose receiving step is of kind `receive`.
Schedule half(const Schedule& allreduce, Collective collective, Step::Kind receive) {
  if (allreduce.collective != Collective::allreduce) {
    throw BadInput("cannot take the {} half of a {}; give an allreduce", name(collective),
                   name(allreduce.collective));
  }
  Schedule s = allreduce;
  s.collective = collective;
  for (int k = s.num_rounds(); k-- > 0;) {
    size_t left = 0;
    for (int r = 0; r < s.world; ++r) {
      // Only the receiving step, in the same round, shows to which half a send belongs.
      std::erase_if(s.rounds[r][k], [&](const Step& step) {
        if (step.kind != Step::Kind::send) return step.kind != receive;
        const Round& other = allreduce.rounds[step.peer][k];
        return std::none_of(other.begin(), other.end(), [&](const Step& end) {
          return end.kind == receive && end.peer == r && end.chunk == step.chunk;
        });
      });
      left += s.rounds[r][k].size();
    }
    if (left > 0) continue;
    for (auto& rounds : s.rounds) rounds.erase(rounds.begin() + k);
  }
  return s;
}

}  // namespace

Schedule reduce_scatter(const Schedule& allreduce) {
  Schedule s = half(allreduce, Collective::reduce_scatter, Step::Kind::recv_reduce);
  // The owner's encode belongs to the gather.
  s.lossy_steps = std::max(0, s.lossy_steps - 1);
  s.inter_node_lossy_steps = std::max(0, s.inter_node_lossy_steps - 1);
  return s;
}

Schedule all_gather(const Schedule& allreduce) {
  Schedule s = half(allreduce, Collective::all_gather, Step::Kind::recv_copy);
  s.lossy_steps = std::min(1, s.lossy_steps);
  s.inter_node_lossy_steps = std::min(1, s.inter_node_lossy_steps);
  return s;
}

Schedule pipelined(const Schedule& schedule, int slices) {
  if (slices < 1) throw BadInput("a pipelined schedule needs at least 1 slice, got {}", slices);
  Schedule s = schedule;
  if (slices == 1) return s;
  s.chunks *= slices;
  s.owner.clear();
  for (int c = 0; c < s.chunks; ++c) s.owner.push_back(schedule.owner[c / slices]);
  int rounds = schedule.num_rounds();
  for (int r = 0; r < s.world && rounds > 0; ++r) {
    s.rounds[r].assign(2 * (rounds - 1) + slices, {});
    // Within a round, slices ascend on every rank, so transfers between two ranks match in order.
    for (int slice = 0; slice < slices; ++slice) {
      for (int k = 0; k < rounds; ++k) {
        for (Step step : schedule.rounds[r][k]) {
          step.chunk = step.chunk * slices + slice;
          s.rounds[r][2 * k + slice].push_back(step);
        }
      }
    }
  }
  return s;
}

ElementRange chunk_range(int64_t count, int chunks, int chunk, int64_t granularity) {
  int64_t units = (count + granularity - 1) / granularity;
  auto edge = [&](int64_t c) { return std::min(count, units * c / chunks * granularity); };
  return {edge(chunk), edge(chunk + 1)};
}

std::vector<ElementRange> chunk_ranges(const Schedule& schedule, int64_t count, const Shards& shards,
                                       int64_t granularity) {
  std::vector<ElementRange> ranges;
  if (shards.empty()) {
    for (int c = 0; c < schedule.chunks; ++c) {
      ranges.push_back(chunk_range(count, schedule.chunks, c, granularity));
    }
    return ranges;
  }
  if (std::ssize(shards) != schedule.world) {
    throw BadInput("{} shards for {} ranks", shards.size(), schedule.world);
  }
  std::vector<int> owned(shards.size()), placed(shards.size());
  for (int32_t rank : schedule.owner) ++owned[rank];
  std::vector<int64_t> begin = {0};
  for (size_t r = 0; r < shards.size(); ++r) {
    if (shards[r] < 0) throw BadInput("the shard of rank {} has {} elements", r, shards[r]);
    if (shards[r] > 0 && owned[r] == 0) {
      throw BadInput(
          "with schedule={} rank {} owns no part of a {}, and its shard has {} elements; "
          "use schedule=ring, two_shot or hierarchical",
          name(schedule.kind), r, name(schedule.collective), shards[r]);
    }
    begin.push_back(begin.back() + shards[r]);
  }
  if (begin.back() != count) {
    throw BadInput("the shards have {} elements in all, not {}", begin.back(), count);
  }
  for (int32_t rank : schedule.owner) {
    const ElementRange part = chunk_range(shards[rank], owned[rank], placed[rank]++, granularity);
    ranges.push_back({begin[rank] + part.begin, begin[rank] + part.end});
  }
  return ranges;
}

int64_t elements_sent(const Schedule& schedule, int rank, int64_t count, const Shards& shards) {
  const std::vector<ElementRange> ranges = chunk_ranges(schedule, count, shards);
  int64_t sent = 0;
  for (const Round& round : schedule.rounds[rank]) {
    for (const Step& step : round) {
      if (step.kind == Step::Kind::send) sent += ranges[step.chunk].count();
    }
  }
  return sent;
}

int64_t elements_owned(const Schedule& schedule, int rank, int64_t count, int64_t granularity,
                       const Shards& shards) {
  const std::vector<ElementRange> ranges = chunk_ranges(schedule, count, shards, granularity);
  int64_t owned = 0;
  for (int c = 0; c < schedule.chunks; ++c) {
    if (schedule.owner[c] == rank) owned += ranges[c].count();
  }
  return owned;
}

namespace detail {

Topology complete(Topology t, int world) {
  if (t.nodes < 0 || t.per_node < 0) throw BadInput("nodes and ranks per node cannot be negative");
  if (t.nodes == 0 && t.per_node == 0) {
    throw BadInput("schedule=hierarchical needs the number of ranks per node; set it or use schedule=ring");
  }
  if (t.per_node == 0 && world % t.nodes == 0) t.per_node = world / t.nodes;
  if (t.nodes == 0 && world % t.per_node == 0) t.nodes = world / t.per_node;
  if (t.nodes * t.per_node != world) {
    auto part = [](int n, const char* unit) {
      return n == 0 ? fmt::format("equal {}", unit) : fmt::format("{} {}", n, unit);
    };
    throw BadInput(
        "schedule=hierarchical: {} ranks are not {} of {}; use nodes of equal size or schedule=ring", world,
        part(t.nodes, "nodes"), part(t.per_node, "ranks"));
  }
  return t;
}

}  // namespace detail

Schedule nccl_allreduce(int world) {
  Schedule s = ring(world);
  s.kind = ScheduleKind::nccl;
  s.lossy_steps = s.inter_node_lossy_steps = 0;
  return s;
}

Schedule make_schedule(Collective collective, ScheduleKind kind, int world, Topology topology, int root) {
  if (kind == ScheduleKind::nccl && collective != Collective::allreduce) {
    throw BadInput("schedule=nccl is NCCL's allreduce, and this is a {}; use schedule=auto",
                   name(collective));
  }
  switch (collective) {
    case Collective::allreduce:
      break;
    case Collective::reduce_scatter:
      return reduce_scatter(make_schedule(kind, world, topology));
    case Collective::all_gather:
      return all_gather(make_schedule(kind, world, topology));
    case Collective::broadcast:
      return broadcast(kind, world, root, topology);
  }
  return make_schedule(kind, world, topology);
}

void emit_schedule(ScheduleKind kind, int world, Topology topology, const TransferSink& sink) {
  const KindRow& is = row(kind);
  if (is.emit == nullptr) throw Error("emit_schedule: the transfers of schedule={} are unknown", is.name);
  if (world > is.max_world) {
    throw BadInput("schedule={} serves at most {} ranks, not {}; use schedule=ring", is.name, is.max_world,
                   world);
  }
  is.emit(world, topology, sink);
}

Schedule make_schedule(ScheduleKind kind, int world, Topology topology) {
  if (kind == ScheduleKind::nccl) return nccl_allreduce(world);
  if (kind == ScheduleKind::automatic) {
    throw Error("make_schedule: schedule=auto must be resolved by the planner");
  }
  return detail::collect([&](const TransferSink& sink) { emit_schedule(kind, world, topology, sink); });
}

}  // namespace gradwire
