#include "trainer/plan/simulator.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <queue>
#include <tuple>

#include "collectives/program/program.h"
#include "collectives/schedule/schedule.h"
#include "kernels/wire/format.h"
#include "trainer/plan/nccl_model.h"

namespace gradwire {
namespace {

// Rounds of a run that are simulated: the first rounds, and the rounds whose time is extrapolated.
constexpr int kFirstRounds = 32, kMeasuredRounds = 32;

// The flows of a run with their paths, and the flows of each rank.
struct Exchange {
  std::vector<Fabric::Path> paths;
  std::vector<double> bytes;
  std::vector<std::pair<int, int>> ends;   // simulated ranks
  std::vector<std::vector<int>> of_ranks;  // [simulated rank]
};

class Simulation {
 public:
  // `limit`: most rounds of a run.
  Simulation(const FlowRounds& rounds, const Fabric& fabric, double bytes, double intra_node_bytes, int limit)
      : fabric_(fabric), ranks_(fabric.period()), active_(fabric.links()), is_dirty_(fabric.links()) {
    for (const FlowRounds::Run& run : rounds.runs) {
      exchanges_.push_back(prepare(run, bytes / rounds.chunks, intra_node_bytes / rounds.chunks));
      for (int k = 0; k < std::min(limit, run.rounds); ++k)
        rounds_.push_back(static_cast<int>(exchanges_.size()) - 1);
    }
    at_.assign(ranks_, -1);
    outstanding_.assign(ranks_, 0);
  }

  double run() {
    for (int r = 0; r < ranks_; ++r) idle_.push_back(r);
    advance();
    while (!events_.empty()) {
      now_ = events_.top().us;
      // All events of this moment come before the new shares of the links.
      while (!events_.empty() && events_.top().us <= now_ * (1 + 1e-12)) {
        const Event event = events_.top();
        events_.pop();
        Message& message = messages_[event.message];
        if (message.version != event.version) continue;
        message.moving ? finish(event.message) : start(event.message);
      }
      advance();
      // Recompute the speed of all messages on links whose number of messages changed.
      for (int link : dirty_) {
        is_dirty_[link] = false;
        for (int number : active_[link]) update(number);
      }
      dirty_.clear();
    }
    return now_;
  }

 private:
  struct Message {
    const Fabric::Path* path = nullptr;
    int a = 0, b = 0;  // simulated ranks of both ends
    double left = 0, bytes_per_us = 0, since = 0;
    int version = 0;  // events of earlier versions are void
    bool moving = false;
  };
  struct Event {
    double us;
    int message, version;
    bool operator>(const Event& other) const {
      return us != other.us ? us > other.us : message > other.message;
    }
  };

  Exchange prepare(const FlowRounds::Run& run, double chunk, double intra_node_chunk) const {
    Exchange out;
    out.of_ranks.resize(ranks_);
    for (const Flow& flow : run.flows) {
      const int index = static_cast<int>(out.paths.size()), to = flow.to % ranks_;
      out.paths.push_back(fabric_.path(flow.from, flow.to));
      out.bytes.push_back((flow.intra_node ? intra_node_chunk : chunk) * flow.chunks);
      out.ends.emplace_back(flow.from, to);
      out.of_ranks[flow.from].push_back(index);
      if (to != flow.from) out.of_ranks[to].push_back(index);
    }
    return out;
  }

  // Moves idle ranks to their next round, and posts the messages whose two ends are in it.
  void advance() {
    while (!idle_.empty()) {
      const int rank = idle_.back();
      idle_.pop_back();
      if (++at_[rank] >= std::ssize(rounds_)) continue;
      const Exchange& exchange = exchanges_[rounds_[at_[rank]]];
      const std::vector<int>& flows = exchange.of_ranks[rank];
      outstanding_[rank] = static_cast<int>(flows.size());
      if (flows.empty()) idle_.push_back(rank);
      for (int flow : flows) {
        const auto [a, b] = exchange.ends[flow];
        if (at_[a] == at_[b]) post(exchange, flow);
      }
    }
  }

  void post(const Exchange& exchange, int flow) {
    if (free_.empty()) {
      free_.push_back(static_cast<int>(messages_.size()));
      messages_.emplace_back();
    }
    const int number = free_.back();
    free_.pop_back();
    Message& message = messages_[number];
    message.path = &exchange.paths[flow];
    std::tie(message.a, message.b) = exchange.ends[flow];
    message.left = exchange.bytes[flow];
    message.moving = false;
    events_.push({now_ + message.path->latency_us, number, ++message.version});
  }

  void start(int number) {
    Message& message = messages_[number];
    message.moving = true;
    message.bytes_per_us = 0;
    message.since = now_;
    for (int i = 0; i < message.path->size; ++i) {
      active_[message.path->links[i]].push_back(number);
      touch(message.path->links[i]);
    }
  }

  void finish(int number) {
    Message& message = messages_[number];
    ++message.version;
    for (int i = 0; i < message.path->size; ++i) {
      std::vector<int>& on_link = active_[message.path->links[i]];
      *std::find(on_link.begin(), on_link.end(), number) = on_link.back();
      on_link.pop_back();
      touch(message.path->links[i]);
    }
    if (--outstanding_[message.a] == 0) idle_.push_back(message.a);
    if (message.a != message.b && --outstanding_[message.b] == 0) idle_.push_back(message.b);
    free_.push_back(number);
  }

  void touch(int link) {
    if (is_dirty_[link]) return;
    is_dirty_[link] = true;
    dirty_.push_back(link);
  }

  void update(int number) {
    Message& message = messages_[number];
    double speed = std::numeric_limits<double>::infinity();
    for (int i = 0; i < message.path->size; ++i) {
      const int link = message.path->links[i];
      speed = std::min(speed, fabric_.bytes_per_us(link) / static_cast<double>(active_[link].size()));
    }
    if (speed == message.bytes_per_us) return;
    message.left = std::max(0.0, message.left - message.bytes_per_us * (now_ - message.since));
    message.since = now_;
    message.bytes_per_us = speed;
    events_.push({now_ + message.left / speed, number, ++message.version});
  }

  const Fabric& fabric_;
  const int ranks_;
  std::vector<Exchange> exchanges_;
  std::vector<int> rounds_;            // [round], index of its exchange
  std::vector<int> at_, outstanding_;  // [rank]: current round, and its unfinished messages
  std::vector<int> idle_;
  std::vector<Message> messages_;
  std::vector<int> free_;
  std::vector<std::vector<int>> active_;  // [link], its moving messages
  std::vector<int> dirty_;
  std::vector<bool> is_dirty_;
  std::priority_queue<Event, std::vector<Event>, std::greater<>> events_;
  double now_ = 0;
};

}  // namespace

double simulate_us(const FlowRounds& rounds, const Fabric& fabric, double bytes, double intra_node_bytes,
                   bool every_round) {
  const int few = kFirstRounds, many = every_round ? std::numeric_limits<int>::max() : few + kMeasuredRounds;
  int more = 0, left = 0;  // rounds beyond `few` and beyond `many`
  for (const FlowRounds::Run& run : rounds.runs) {
    more += std::min(run.rounds, many) - std::min(run.rounds, few);
    left += run.rounds - std::min(run.rounds, many);
  }
  const double us = Simulation(rounds, fabric, bytes, intra_node_bytes, many).run();
  if (left == 0) return us;
  return us + left * (us - Simulation(rounds, fabric, bytes, intra_node_bytes, few).run()) / more;
}

std::vector<std::vector<double>> sent_by_level(const FlowRounds& rounds, const Fabric& fabric) {
  std::vector<std::vector<double>> sent(fabric.levels().size(), std::vector<double>(fabric.period()));
  for (const FlowRounds::Run& run : rounds.runs) {
    for (const Flow& flow : run.flows) {
      const Fabric::Path path = fabric.path(flow.from, flow.to);
      const double part = static_cast<double>(flow.chunks) * run.rounds / rounds.chunks;
      if (path.inside) sent[0][flow.from] += part;
      for (int level = 1; level < path.levels; ++level) sent[level][flow.from] += part;
    }
  }
  return sent;
}

namespace {

constexpr int kMinExponent = 10;  // smaller buffers take the time of 1 KiB

ScheduleKind transfers_of(ScheduleKind kind) {
  return kind == ScheduleKind::nccl ? ScheduleKind::ring : kind;
}

}  // namespace

SimulatedSchedule::SimulatedSchedule(ScheduleKind kind, const Cluster& cluster, int ranks)
    : cluster_(cluster), kind_(kind), fabric_(cluster, ranks, is_symmetric(transfers_of(kind))) {
  const std::vector<std::vector<double>> levels = sent_by_level(flows(1), fabric_);
  // NCCL rotates its rings, so that every rank has its turn at a network card.
  const auto busiest = [&](const std::vector<double>& sent) {
    return kind == ScheduleKind::nccl ? std::reduce(sent.begin(), sent.end()) / fabric_.period()
                                      : *std::max_element(sent.begin(), sent.end());
  };
  for (const std::vector<double>& level : levels) busiest_.push_back(busiest(level));
  std::vector<double> all = levels[0];  // of each rank; a rank's messages are on the first two levels
  for (size_t r = 0; levels.size() > 1 && r < all.size(); ++r) all[r] += levels[1][r];
  busiest_of_all_ = busiest(all);
}

bool SimulatedSchedule::supports(ScheduleKind kind, const Cluster& cluster, int ranks) {
  const int per_node = std::min(ranks, cluster.gpus_per_node);
  if (kind == ScheduleKind::hierarchical) return per_node > 1 && per_node < ranks && per_node <= kMaxInputs;
  return kind != ScheduleKind::automatic && ranks <= max_world(kind);
}

const FlowRounds& SimulatedSchedule::flows(int slices) {
  auto at = flows_.find(slices);
  if (at == flows_.end()) {
    at = flows_.emplace(slices, flow_rounds(transfers_of(kind_), fabric_, slices)).first;
  }
  return at->second;
}

double SimulatedSchedule::knot_us(int exponent, double inside) {
  auto [at, is_new] = knots_.try_emplace({exponent, inside}, 0);
  if (!is_new) return at->second;
  const double bytes = std::exp2(exponent);
  const double slices = std::ceil(bytes / outline().chunks / kSliceBytes);
  const FlowRounds& rounds = flows(static_cast<int>(std::clamp<double>(slices, 1, Program::kMaxSlices)));
  return at->second = simulate_us(rounds, fabric_, bytes, inside * bytes);
}

AllreduceCost SimulatedSchedule::cost(int64_t count, Wire wire, bool fp32_inside) {
  const auto bytes = static_cast<double>(wire->bytes(count));
  AllreduceCost out{.schedule = name(kind_)};
  out.sent_bytes = busiest_of_all_ * bytes;
  if (is_fp32_inside(fp32_inside)) {  // every rank of a hierarchical schedule sends on both levels
    const std::vector<double> levels = level_bytes(count, wire, fp32_inside);
    out.sent_bytes = levels[0] + levels[1];
  }
  if (kind_ == ScheduleKind::nccl) {
    out.us = nccl_allreduce_estimate(cluster_, fabric_.ranks(), bytes).us;
    return out;
  }
  const double inside = fp32_inside ? static_cast<double>(kFp32->bytes(count)) / bytes : 1;
  const int exponent = std::max(kMinExponent, static_cast<int>(std::log2(bytes)));
  const double low = knot_us(exponent, inside), high = knot_us(exponent + 1, inside);
  out.us = low + (high - low) * std::max(0.0, bytes / std::exp2(exponent) - 1);
  return out;
}

std::vector<double> SimulatedSchedule::level_bytes(int64_t count, Wire wire, bool fp32_inside) const {
  std::vector<double> out;
  for (double fraction : busiest_) {
    const Wire format = is_fp32_inside(fp32_inside) && out.empty() ? kFp32 : wire;
    out.push_back(fraction * static_cast<double>(format->bytes(count)));
  }
  return out;
}

Fabric::Fabric(const Cluster& cluster, int ranks, bool symmetric)
    : cluster_(cluster),
      ranks_(ranks),
      per_node_(std::min(ranks, cluster.gpus_per_node)),
      period_(symmetric ? cluster.symmetric_ranks(ranks) : ranks) {
  check_ranks(cluster, ranks);
  levels_.push_back(cluster.nvlink ? "nvlink" : "pcie");
  gpus_ = add_both(1, cluster.gpu.gb_per_s);
  if (cluster.gpus_per_root > 0 && per_node_ > cluster.gpus_per_root) {
    roots_ = add_both(cluster.gpus_per_root, cluster.root_gb_per_s);
  }
  if (ranks <= per_node_) return;
  levels_.push_back("nic");
  const int sharing = std::max(1, per_node_ / cluster.nics);  // ranks that share a network card
  const double card = cluster.nic.gb_per_s * cluster.nics * sharing / per_node_;
  nics_ = add_both(sharing, card);
  for (const Cluster::Level& level : cluster.switches) {
    const int below = level.nodes * per_node_;
    if (below >= ranks) break;
    levels_.push_back(fmt::format("switch {}", switches_.size() + 1));
    switches_.push_back(
        add_both(below, cluster.nic.gb_per_s * cluster.nics * level.nodes / level.oversubscription));
  }
}

Fabric::Both Fabric::add_both(int group, double gb_per_s) {
  const int count = (period_ + group - 1) / group;
  const Both both{.out = links(), .in = links() + count, .group = group};
  bytes_per_us_.resize(both.in + count, gb_per_s * 1e3);
  return both;
}

void Fabric::cross(Path& path, const Both& links, int from, int to) const {
  path.add(links.out + from % period_ / links.group);
  path.add(links.in + to % period_ / links.group);
}

Fabric::Path Fabric::path(int from, int to) const {
  Path path;
  path.inside = from / per_node_ == to / per_node_;
  path.latency_us = path.inside ? cluster_.gpu.latency_us : cluster_.nic.latency_us;
  // Between nodes, data leaves a GPU through PCIe, whose bandwidth NVLink does not share.
  if (path.inside || !cluster_.nvlink) {
    cross(path, gpus_, from, to);
    const int group = roots_.group;
    if (group > 0 && (!path.inside || from / group != to / group)) cross(path, roots_, from, to);
  }
  if (path.inside) return path;
  cross(path, nics_, from, to);
  path.levels = 2;
  for (const Both& level : switches_) {
    if (from / level.group == to / level.group) break;
    cross(path, level, from, to);
    ++path.levels;
  }
  return path;
}

namespace {

using Rounds = std::vector<std::vector<Flow>>;

class FlowSink {
 public:
  explicit FlowSink(int period) : period_(period) {}
  void begin(const Schedule& given, int count) {
    outline = given;
    rounds.resize(outline.world == 1 ? 0 : count);
  }
  void add(int round, int from, int to, bool intra_node) {
    if (from >= period_) return;
    std::vector<Flow>& flows = rounds[round];
    // Chunks of one message come one after another in the schedules with many chunks per message.
    if (!flows.empty() && flows.back().from == from && flows.back().to == to) {
      ++flows.back().chunks;
    } else {
      flows.push_back({from, to, 1, intra_node});
    }
  }

  Schedule outline;
  Rounds rounds;

 private:
  const int period_;
};

FlowRounds collect(FlowSink&& sink, int slices) {
  FlowRounds out{.outline = std::move(sink.outline), .chunks = 1, .runs = {}};
  out.chunks = out.outline.chunks * slices;
  // The rounds of pipelined(): round k of slice i is round i + 2 k.
  Rounds all(sink.rounds.empty() ? 0 : 2 * (sink.rounds.size() - 1) + slices);
  if (slices == 1) all = std::move(sink.rounds);
  for (int slice = 0; slices > 1 && slice < slices; ++slice) {
    for (size_t k = 0; k < sink.rounds.size(); ++k) {
      std::vector<Flow>& into = all[2 * k + slice];
      into.insert(into.end(), sink.rounds[k].begin(), sink.rounds[k].end());
    }
  }
  for (std::vector<Flow>& flows : all) {
    const auto ends = [](const Flow& flow) { return std::pair(flow.from, flow.to); };
    std::ranges::stable_sort(flows, {}, ends);
    size_t last = 0;  // merges the flows between the same ranks
    for (size_t i = 1; i < flows.size(); ++i) {
      if (ends(flows[i]) == ends(flows[last])) {
        flows[last].chunks += flows[i].chunks;
      } else {
        flows[++last] = flows[i];
      }
    }
    if (!flows.empty()) flows.resize(last + 1);
    if (!out.runs.empty() && out.runs.back().flows == flows) {
      ++out.runs.back().rounds;
    } else {
      out.runs.push_back({std::move(flows), 1});
    }
  }
  return out;
}

}  // namespace

bool is_symmetric(ScheduleKind kind) {
  return kind != ScheduleKind::tree;
}

FlowRounds flow_rounds(ScheduleKind kind, const Fabric& fabric, int slices) {
  FlowSink sink(fabric.period());
  emit_schedule(kind, fabric.ranks(), {.nodes = 0, .per_node = fabric.per_node()},
                {.begin = [&](const Schedule& outline, int rounds) { sink.begin(outline, rounds); },
                 .add = [&](int round, int from, int to, int, Step::Kind,
                            bool intra_node) { sink.add(round, from, to, intra_node); }});
  return collect(std::move(sink), slices);
}

FlowRounds flow_rounds(const Schedule& schedule) {
  FlowSink sink(schedule.world);
  sink.begin(schedule, schedule.num_rounds());
  sink.outline.rounds.clear();
  for (int k = 0; k < schedule.num_rounds(); ++k) {
    for (int r = 0; r < schedule.world; ++r) {
      for (const Step& step : schedule.rounds[r][k]) {
        if (step.kind == Step::Kind::send) sink.add(k, r, step.peer, step.intra_node);
      }
    }
  }
  return collect(std::move(sink), 1);
}

}  // namespace gradwire
