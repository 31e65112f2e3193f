// The rule `cost`: bytes sent and received are the known optimum.
#include <fmt/format.h>

#include <numeric>
#include <utility>

#include "collectives/schedule/checker.h"

namespace gradwire {
namespace {

class CostChecker {
 public:
  CostChecker(const Schedule& schedule, CheckReport& report) : s_(schedule), report_(report) {}

  // Checks that in each half all ranks together send (n-1) times the buffer, and no rank sends more than the
  // whole buffer.
  void check_tree() {
    const int64_t total =
        std::accumulate(report_.sent_inter_node.begin(), report_.sent_inter_node.end(), int64_t{0});
    if (total != halves() * (s_.world - 1) * s_.chunks) {
      violation("all ranks together send {}, the optimum is {} times the buffer", fraction(total),
                halves() * (s_.world - 1));
    }
    for (int r = 0; r < s_.world; ++r) {
      for (auto [moved, what] :
           {std::pair{report_.sent_inter_node[r], "sends"}, {report_.received_inter_node[r], "receives"}}) {
        if (moved <= halves() * s_.chunks) continue;
        violation("rank {} {} {}, a double tree needs at most {} times the buffer", r, what, fraction(moved),
                  halves());
      }
    }
  }

  // Checks that each half moves (n-1)/n of the buffer. In a hierarchical schedule, a half moves this fraction
  // of the whole buffer inside a node, and of a rank's shard between nodes. Compares numerators over a common
  // denominator, which is exact.
  void check_even() {
    const bool layered = s_.kind == ScheduleKind::hierarchical;
    const int64_t per_node = s_.per_node, groups = layered ? s_.nodes : s_.world;
    const int64_t inter_over = layered ? groups * per_node : groups;
    const int64_t inter = halves() * (groups - 1) * s_.chunks;
    const int64_t intra = layered ? halves() * (per_node - 1) * s_.chunks : 0;
    auto expect = [&](int r, int64_t moved, int64_t want, int64_t over, const char* what) {
      if (moved * over == want) return;
      violation("rank {} {} {}, the optimum is {}/{} of the buffer", r, what, fraction(moved),
                want / s_.chunks, over);
    };
    for (int r = 0; r < s_.world; ++r) {
      expect(r, report_.sent_inter_node[r], inter, inter_over, "sends between nodes");
      expect(r, report_.received_inter_node[r], inter, inter_over, "receives between nodes");
      expect(r, report_.sent_intra_node[r], intra, per_node, "sends inside its node");
      expect(r, report_.received_intra_node[r], intra, per_node, "receives inside its node");
    }
  }

  // Checks that every rank but the root receives the buffer once, and that the buffer enters each node once.
  // The root sends the buffer once to the other nodes, if any, and once to the other ranks of its node, if
  // any.
  void check_broadcast() {
    const int root = s_.owner[0];
    auto expect = [&](int r, int64_t moved, int64_t want, const char* what) {
      if (moved != want)
        violation("rank {} {} {}, the optimum is {}", r, what, fraction(moved), fraction(want));
    };
    for (int r = 0; r < s_.world; ++r) {
      expect(r, report_.received_inter_node[r] + report_.received_intra_node[r], r == root ? 0 : s_.chunks,
             "receives");
      const int64_t most_inside = 2 * s_.chunks;
      if (report_.sent_inter_node[r] <= s_.chunks && report_.sent_intra_node[r] <= most_inside) continue;
      violation("rank {} sends {} between nodes and {} inside its own, at most {} and {} are needed", r,
                fraction(report_.sent_inter_node[r]), fraction(report_.sent_intra_node[r]),
                fraction(s_.chunks), fraction(most_inside));
    }
    expect(root, report_.sent_inter_node[root], s_.nodes > 1 ? s_.chunks : 0, "sends between nodes");
    expect(root, report_.sent_intra_node[root], s_.per_node > 1 ? s_.chunks : 0, "sends inside its node");
    for (int node = 0; node < s_.nodes; ++node) {
      int64_t entered = 0;
      for (int l = 0; l < s_.per_node; ++l) entered += report_.received_inter_node[node * s_.per_node + l];
      if (entered != (node == root / s_.per_node ? 0 : s_.chunks)) {
        violation("node {} is entered by {}", node, fraction(entered));
      }
    }
  }

 private:
  template <typename... Args>
  void violation(fmt::format_string<Args...> text, Args&&... args) {
    report_.add(CheckReport::Rule::cost, fmt::format(text, std::forward<Args>(args)...));
  }
  std::string fraction(int64_t chunks) const { return fmt::format("{}/{} of the buffer", chunks, s_.chunks); }
  int64_t halves() const { return s_.collective == Collective::allreduce ? 2 : 1; }

  const Schedule& s_;
  CheckReport& report_;
};

}  // namespace

void check_cost(const Schedule& schedule, CheckReport& report) {
  CostChecker checker(schedule, report);
  if (schedule.collective == Collective::broadcast) return checker.check_broadcast();
  if (schedule.kind == ScheduleKind::tree) return checker.check_tree();
  checker.check_even();
}

}  // namespace gradwire
