#include "collectives/schedule/checker.h"

#include <fmt/format.h>

#include <algorithm>
#include <deque>
#include <memory>
#include <numeric>
#include <utility>

#include "kernels/wire/format.h"

namespace gradwire {
namespace {

using Rule = CheckReport::Rule;

// A rank's value of a chunk, or a sent value. Immutable once sent.
struct Value {
  std::vector<uint8_t> parts;  // [rank]: how often the value includes the rank's contribution; at most 255
  int lossy_steps = 0;         // the largest number of roundings of any part
  int inter_node_lossy_steps = 0;
  // Whether the value was closed without rounding, with the wire format only on links between nodes.
  bool exact = false;
};

struct Holding {
  enum class Stage : uint8_t { open, closed, final };
  Stage stage = Stage::open;
  int closed_in = -1;  // the round in which the sum was closed
  int inputs = 0;
  std::shared_ptr<Value> value;
};

struct Post {
  int round = 0;
  int step = 0;                  // index of the step in its rank's round
  std::shared_ptr<Value> value;  // the sent value; null for a receive
};

// Simulates a schedule.
class Simulation {
 public:
  Simulation(const Schedule& schedule, CheckReport& report) : s_(schedule), report_(report) {}

  bool well_formed() {
    if (s_.world < 1 || s_.chunks < 1 || std::ssize(s_.rounds) != s_.world) {
      report_.add(Rule::form, fmt::format("world {}, {} chunks and rounds of {} ranks", s_.world, s_.chunks,
                                          s_.rounds.size()));
      return false;
    }
    if (std::ssize(s_.owner) != s_.chunks ||
        std::any_of(s_.owner.begin(), s_.owner.end(), [&](int r) { return r < 0 || r >= s_.world; })) {
      report_.add(Rule::form,
                  fmt::format("each of the {} chunks needs an owner among {} ranks", s_.chunks, s_.world));
      return false;
    }
    if (s_.per_node < 1 || s_.nodes * s_.per_node != s_.world) {
      report_.add(Rule::form,
                  fmt::format("{} nodes of {} ranks are not {} ranks", s_.nodes, s_.per_node, s_.world));
      return false;
    }
    for (int r = 0; r < s_.world; ++r) {
      if (std::ssize(s_.rounds[r]) != s_.num_rounds()) {
        report_.add(Rule::form, fmt::format("rank {} has {} rounds, rank 0 has {}", r, s_.rounds[r].size(),
                                            s_.num_rounds()));
      }
      for (int k = 0; k < std::ssize(s_.rounds[r]); ++k) check_round_form(r, k);
    }
    return report_.correct;
  }

  void count_transfers() {
    for (auto* counts : {&report_.sent_inter_node, &report_.sent_intra_node, &report_.received_inter_node,
                         &report_.received_intra_node}) {
      counts->assign(s_.world, 0);
    }
    std::vector<int64_t> links(static_cast<size_t>(s_.world) * s_.world);
    for (int r = 0; r < s_.world; ++r) {
      for (const Round& round : s_.rounds[r]) {
        for (const Step& step : round) {
          if (step.kind == Step::Kind::send) {
            ++(step.intra_node ? report_.sent_intra_node : report_.sent_inter_node)[r];
            ++links[static_cast<size_t>(r) * s_.world + step.peer];
            ++report_.messages;
          } else {
            ++(step.intra_node ? report_.received_intra_node : report_.received_inter_node)[r];
          }
        }
      }
    }
    report_.busiest_link = *std::max_element(links.begin(), links.end());
  }

  void run() {
    holdings_.resize(static_cast<size_t>(s_.world) * s_.chunks);
    for (int r = 0; r < s_.world; ++r) {
      for (int c = 0; c < s_.chunks; ++c) {
        auto value = std::make_shared<Value>();
        const bool gather = s_.collective == Collective::all_gather || s_.collective == Collective::broadcast;
        value->parts.assign(s_.world, gather && s_.owner[c] == r ? 1 : 0);
        if (!gather) value->parts[r] = 1;
        holding(r, c).value = std::move(value);
      }
    }
    size_t pairs = static_cast<size_t>(s_.world) * s_.world;
    sends_.resize(pairs);
    receives_.resize(pairs);
    mismatched_.resize(pairs);
    current_round_.assign(s_.world, -1);
    outstanding_.assign(s_.world, 0);
    arrived_.resize(s_.world);
    for (int r = 0; r < s_.world; ++r) idle_.push_back(r);
    while (!idle_.empty()) {
      int r = idle_.front();
      idle_.pop_front();
      if (current_round_[r] >= 0) finish_round(r);
      if (++current_round_[r] < s_.num_rounds()) post_round(r);
    }
    report_stuck_ranks();
    if (report_.correct) check_results();
  }

  void check_rounding() {
    auto compare = [&](int declared, int seen, const char* where) {
      if (declared != seen) {
        report_.add(Rule::rounding, fmt::format("declares {} lossy steps with the wire on {}, takes {}",
                                                declared, where, seen));
      }
    };
    compare(s_.lossy_steps, report_.lossy_steps, "every link");
    compare(s_.inter_node_lossy_steps, report_.inter_node_lossy_steps, "links between nodes");
    if (report_.max_inputs > kMaxInputs) {
      report_.add(Rule::rounding, fmt::format("a hop adds {} messages at once, more than {}",
                                              report_.max_inputs, kMaxInputs));
    }
  }

 private:
  Holding& holding(int rank, int chunk) { return holdings_[static_cast<size_t>(rank) * s_.chunks + chunk]; }
  size_t link(int from, int to) const { return static_cast<size_t>(from) * s_.world + to; }

  static std::string describe(int rank, int round, const Step& step) {
    const char* verb = step.kind == Step::Kind::send          ? "sends"
                       : step.kind == Step::Kind::recv_reduce ? "adds"
                                                              : "copies";
    return fmt::format("round {}: rank {} {} chunk {} {} rank {}", round, rank, verb, step.chunk,
                       step.kind == Step::Kind::send ? "to" : "from", step.peer);
  }

  void check_round_form(int rank, int k) {
    const Round& round = s_.rounds[rank][k];
    first_use_.resize(s_.chunks, nullptr);
    for (const Step& step : round) {
      auto wrong = [&](const std::string& why) { report_.add(Rule::form, describe(rank, k, step) + why); };
      if (step.peer < 0 || step.peer >= s_.world) {
        wrong(", which does not exist");
        continue;
      }
      if (step.chunk < 0 || step.chunk >= s_.chunks) {
        wrong(fmt::format("; there are chunks 0 to {}", s_.chunks - 1));
        continue;
      }
      if (step.peer == rank) wrong(", itself");
      if (step.intra_node != (rank / s_.per_node == step.peer / s_.per_node)) {
        wrong(step.intra_node ? " over a link inside a node, but that is another node"
                              : " over a link between nodes, but that is the same node");
      }
      const Step*& first = first_use_[step.chunk];
      if (first == nullptr) {
        first = &step;
      } else if (first->kind != step.kind) {
        wrong(" and does something else to it in the same round");
      } else if (step.kind == Step::Kind::recv_copy) {
        wrong(" and copies it a second time in the same round");
      }
    }
    for (const Step& step : round) {
      if (step.chunk >= 0 && step.chunk < s_.chunks) first_use_[step.chunk] = nullptr;
    }
  }

  void post_round(int r) {
    int k = current_round_[r];
    const Round& round = s_.rounds[r][k];
    outstanding_[r] = static_cast<int>(round.size());
    arrived_[r].assign(round.size(), nullptr);
    if (round.empty()) {
      idle_.push_back(r);
      return;
    }
    close_sent_sums(r, k);
    for (int i = 0; i < std::ssize(round); ++i) {
      const Step& step = round[i];
      if (step.kind == Step::Kind::send) {
        sends_[link(r, step.peer)].push_back({k, i, holding(r, step.chunk).value});
      } else {
        receives_[link(step.peer, r)].push_back({k, i, nullptr});
      }
    }
    for (const Step& step : round) {
      step.kind == Step::Kind::send ? match(r, step.peer) : match(step.peer, r);
    }
  }

  // Closes the partial sums that this round sends for the first time. Closing rounds a sum. With the wire
  // format only on links between nodes, a sum is rounded only if one of its sends crosses such a link.
  void close_sent_sums(int r, int k) {
    for (const Step& step : s_.rounds[r][k]) {
      if (step.kind != Step::Kind::send) continue;
      Holding& mine = holding(r, step.chunk);
      Value& value = *mine.value;
      if (mine.stage == Holding::Stage::open) {
        mine.stage = Holding::Stage::closed;
        mine.closed_in = k;
        ++value.lossy_steps;
        value.exact = true;
        report_.max_inputs = std::max(report_.max_inputs, mine.inputs);
      }
      if (step.intra_node || !value.exact) continue;
      if (mine.stage == Holding::Stage::closed && mine.closed_in == k) {
        value.exact = false;
        ++value.inter_node_lossy_steps;
      } else {
        report_.add(Rule::rounding,
                    describe(r, k, step) + " to another node, after it was sent unrounded inside its own");
      }
    }
  }

  void match(int from, int to) {
    auto &sends = sends_[link(from, to)], &receives = receives_[link(from, to)];
    while (!sends.empty() && !receives.empty()) {
      const Post send = sends.front(), receive = receives.front();
      sends.pop_front();
      receives.pop_front();
      const Step& sent = s_.rounds[from][send.round][send.step];
      const Step& wanted = s_.rounds[to][receive.round][receive.step];
      // A mismatch repeats in later transfers of the same two ranks; report only the first mismatch.
      if ((sent.chunk != wanted.chunk || send.round != receive.round) && !mismatched_[link(from, to)]) {
        mismatched_[link(from, to)] = true;
        report_.add(Rule::match, fmt::format("{}, but there it matches {}", describe(from, send.round, sent),
                                             describe(to, receive.round, wanted)));
      }
      arrived_[to][receive.step] = send.value;
      for (int end : {from, to}) {
        if (--outstanding_[end] == 0) idle_.push_back(end);
      }
    }
  }

  void finish_round(int r) {
    int k = current_round_[r];
    const Round& round = s_.rounds[r][k];
    for (int i = 0; i < std::ssize(round); ++i) {
      if (round[i].kind == Step::Kind::send) continue;
      Holding& mine = holding(r, round[i].chunk);
      if (round[i].kind == Step::Kind::recv_copy) {
        mine.stage = Holding::Stage::final;
        mine.value = arrived_[r][i];
        continue;
      }
      if (mine.stage != Holding::Stage::open) {
        report_.add(Rule::result,
                    describe(r, k, round[i]) + (mine.stage == Holding::Stage::final
                                                    ? ", but it already has the final value"
                                                    : ", but it has already sent its partial sum"));
        continue;
      }
      Value& sum = *mine.value;
      const Value& part = *arrived_[r][i];
      for (int p = 0; p < s_.world; ++p) {
        sum.parts[p] = static_cast<uint8_t>(std::min(255, sum.parts[p] + part.parts[p]));
      }
      sum.lossy_steps = std::max(sum.lossy_steps, part.lossy_steps);
      sum.inter_node_lossy_steps = std::max(sum.inter_node_lossy_steps, part.inter_node_lossy_steps);
      ++mine.inputs;
    }
  }

  void report_stuck_ranks() {
    for (int r = 0; r < s_.world; ++r) {
      int k = current_round_[r];
      if (k >= s_.num_rounds()) continue;
      for (int peer = 0; peer < s_.world; ++peer) {
        for (const Post& post : sends_[link(r, peer)]) {
          report_.add(Rule::progress,
                      describe(r, k, s_.rounds[r][k][post.step]) + ", which never receives it");
        }
        for (const Post& post : receives_[link(peer, r)]) {
          report_.add(Rule::progress, describe(r, k, s_.rounds[r][k][post.step]) + ", which never sends it");
        }
      }
    }
  }

  void check_results() {
    const bool scatter = s_.collective == Collective::reduce_scatter;
    for (int r = 0; r < s_.world; ++r) {
      for (int c = 0; c < s_.chunks; ++c) {
        const bool owner = s_.owner[c] == r, copied = holding(r, c).stage == Holding::Stage::final;
        if (scatter && !owner) continue;
        const Value& value = *holding(r, c).value;
        if (owner && copied) {
          report_.add(Rule::ownership,
                      fmt::format("rank {} owns chunk {}, but copies its final value from another", r, c));
        } else if (!owner && !copied) {
          report_.add(
              Rule::ownership,
              fmt::format("rank {} does not own chunk {}, but never gets its final value from the owner", r,
                          c));
        }
        auto wrong =
            std::find_if(value.parts.begin(), value.parts.end(), [](uint8_t times) { return times != 1; });
        if (wrong != value.parts.end()) {
          report_.add(Rule::result,
                      fmt::format("rank {} ends with chunk {} holding {} contributions of rank {}", r, c,
                                  int{*wrong}, wrong - value.parts.begin()));
        }
        report_.lossy_steps = std::max(report_.lossy_steps, value.lossy_steps);
        report_.inter_node_lossy_steps =
            std::max(report_.inter_node_lossy_steps, value.inter_node_lossy_steps);
      }
    }
  }

  const Schedule& s_;
  CheckReport& report_;
  std::vector<const Step*> first_use_;                        // [chunk] within the current round
  std::vector<Holding> holdings_;                             // [rank][chunk]
  std::vector<std::deque<Post>> sends_, receives_;            // [from][to], posted and not matched yet
  std::vector<bool> mismatched_;                              // [from][to]
  std::vector<int> current_round_, outstanding_;              // [rank]
  std::vector<std::vector<std::shared_ptr<Value>>> arrived_;  // [rank][step of its current round]
  std::deque<int> idle_;                                      // ranks that have finished their current round
};

}  // namespace

CheckReport check(const Schedule& schedule) {
  CheckReport report;
  Simulation simulation(schedule, report);
  if (!simulation.well_formed()) return report;
  simulation.count_transfers();
  simulation.run();
  if (report.correct) simulation.check_rounding();
  check_cost(schedule, report);
  return report;
}

void CheckReport::add(Rule rule, const std::string& text) {
  ++violations_found;
  if (rule <= Rule::ownership) correct = false;
  ok = false;
  if (std::ssize(violations) < kMaxViolations) violations.push_back({rule, text});
}

std::string CheckReport::to_string() const {
  if (ok) return "ok";
  std::string text;
  for (const Violation& v : violations) {
    text += fmt::format("{}{}: {}", text.empty() ? "" : "\n", name(v.rule), v.text);
  }
  int64_t unlisted = violations_found - std::ssize(violations);
  if (unlisted > 0) text += fmt::format("\nand {} more", unlisted);
  return text;
}

const char* name(CheckReport::Rule rule) {
  constexpr const char* kNames[] = {"form", "match", "progress", "result", "ownership", "rounding", "cost"};
  return kNames[static_cast<size_t>(rule)];
}

// The rule `cost`: bytes sent and received are the known optimum.

namespace {

std::string fraction(const Schedule& s, int64_t chunks) {
  return fmt::format("{}/{} of the buffer", chunks, s.chunks);
}

int64_t halves(const Schedule& s) {
  return s.collective == Collective::allreduce ? 2 : 1;
}

// Checks that in each half all ranks together send (n-1) times the buffer, and no rank sends more than the
// whole buffer.
void check_tree(const Schedule& s, CheckReport& report) {
  const int64_t total =
      std::accumulate(report.sent_inter_node.begin(), report.sent_inter_node.end(), int64_t{0});
  if (total != halves(s) * (s.world - 1) * s.chunks) {
    report.add(CheckReport::Rule::cost,
               fmt::format("all ranks together send {}, the optimum is {} times the buffer",
                           fraction(s, total), halves(s) * (s.world - 1)));
  }
  for (int r = 0; r < s.world; ++r) {
    for (auto [moved, what] :
         {std::pair{report.sent_inter_node[r], "sends"}, {report.received_inter_node[r], "receives"}}) {
      if (moved <= halves(s) * s.chunks) continue;
      report.add(CheckReport::Rule::cost,
                 fmt::format("rank {} {} {}, a double tree needs at most {} times the buffer", r, what,
                             fraction(s, moved), halves(s)));
    }
  }
}

// Checks that each half moves (n-1)/n of the buffer. In a hierarchical schedule, a half moves this fraction
// of the whole buffer inside a node, and of a rank's shard between nodes. Compares numerators over a common
// denominator, which is exact.
void check_even(const Schedule& s, CheckReport& report) {
  const bool layered = s.kind == ScheduleKind::hierarchical;
  const int64_t per_node = s.per_node, groups = layered ? s.nodes : s.world;
  const int64_t inter_over = layered ? groups * per_node : groups;
  const int64_t inter = halves(s) * (groups - 1) * s.chunks;
  const int64_t intra = layered ? halves(s) * (per_node - 1) * s.chunks : 0;
  auto expect = [&](int r, int64_t moved, int64_t want, int64_t over, const char* what) {
    if (moved * over == want) return;
    report.add(CheckReport::Rule::cost, fmt::format("rank {} {} {}, the optimum is {}/{} of the buffer", r,
                                                    what, fraction(s, moved), want / s.chunks, over));
  };
  for (int r = 0; r < s.world; ++r) {
    expect(r, report.sent_inter_node[r], inter, inter_over, "sends between nodes");
    expect(r, report.received_inter_node[r], inter, inter_over, "receives between nodes");
    expect(r, report.sent_intra_node[r], intra, per_node, "sends inside its node");
    expect(r, report.received_intra_node[r], intra, per_node, "receives inside its node");
  }
}

// Checks that every rank but the root receives the buffer once, and that the buffer enters each node once.
// The root sends the buffer once to the other nodes, if any, and once to the other ranks of its node, if
// any.
void check_broadcast(const Schedule& s, CheckReport& report) {
  const int root = s.owner[0];
  auto expect = [&](int r, int64_t moved, int64_t want, const char* what) {
    if (moved != want)
      report.add(CheckReport::Rule::cost, fmt::format("rank {} {} {}, the optimum is {}", r, what,
                                                      fraction(s, moved), fraction(s, want)));
  };
  for (int r = 0; r < s.world; ++r) {
    expect(r, report.received_inter_node[r] + report.received_intra_node[r], r == root ? 0 : s.chunks,
           "receives");
    const int64_t max_inside = 2 * s.chunks;
    if (report.sent_inter_node[r] <= s.chunks && report.sent_intra_node[r] <= max_inside) continue;
    report.add(
        CheckReport::Rule::cost,
        fmt::format("rank {} sends {} between nodes and {} inside its own, at most {} and {} are needed", r,
                    fraction(s, report.sent_inter_node[r]), fraction(s, report.sent_intra_node[r]),
                    fraction(s, s.chunks), fraction(s, max_inside)));
  }
  expect(root, report.sent_inter_node[root], s.nodes > 1 ? s.chunks : 0, "sends between nodes");
  expect(root, report.sent_intra_node[root], s.per_node > 1 ? s.chunks : 0, "sends inside its node");
  for (int node = 0; node < s.nodes; ++node) {
    int64_t entered = 0;
    for (int l = 0; l < s.per_node; ++l) entered += report.received_inter_node[node * s.per_node + l];
    if (entered != (node == root / s.per_node ? 0 : s.chunks)) {
      report.add(CheckReport::Rule::cost,
                 fmt::format("node {} is entered by {}", node, fraction(s, entered)));
    }
  }
}

}  // namespace

void check_cost(const Schedule& schedule, CheckReport& report) {
  if (schedule.collective == Collective::broadcast) return check_broadcast(schedule, report);
  if (schedule.kind == ScheduleKind::tree) return check_tree(schedule, report);
  check_even(schedule, report);
}

}  // namespace gradwire
