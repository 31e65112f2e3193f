#include "trainer/plan/simulator.h"

#include <algorithm>
#include <limits>
#include <queue>
#include <tuple>

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
      share_links();
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

  // Recomputes the speed of all messages on links whose number of messages changed.
  void share_links() {
    for (int link : dirty_) {
      is_dirty_[link] = false;
      for (int number : active_[link]) update(number);
    }
    dirty_.clear();
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

double simulate_every_round_us(const FlowRounds& rounds, const Fabric& fabric, double bytes,
                               double intra_node_bytes) {
  return Simulation(rounds, fabric, bytes, intra_node_bytes, std::numeric_limits<int>::max()).run();
}

double simulate_us(const FlowRounds& rounds, const Fabric& fabric, double bytes, double intra_node_bytes) {
  const int few = kFirstRounds, many = few + kMeasuredRounds;
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

}  // namespace gradwire
