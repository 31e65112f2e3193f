// Random schedules, and random damage to schedules, for tests of damage detection.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <string>
#include <vector>

#include "collectives/schedule/schedule.h"

namespace gradwire::testing {

// Returns a schedule of any kind for 2 to `most` ranks, sometimes in slices: an allreduce or, with `halves`,
// also a half of an allreduce or a broadcast.
inline Schedule random_schedule(std::mt19937_64& random, int most, bool halves = false) {
  auto up_to = [&](int n) { return 1 + static_cast<int>(random() % n); };
  int n = 1 + up_to(most - 1);
  Schedule s;
  if (halves && random() % 6 == 0) {
    std::vector<ScheduleKind> kinds = all_schedules();
    std::erase_if(kinds, [](ScheduleKind kind) { return !has_broadcast(kind); });
    const int nodes = up_to(n), world = nodes * std::max(nodes == 1 ? 2 : 1, n / nodes);
    s = broadcast(kinds[random() % kinds.size()], world, up_to(world) - 1, {.nodes = nodes});
    return random() % 3 == 0 ? pipelined(s, 1 + up_to(3)) : s;
  }
  // Hierarchical schedules have many shapes, so they are drawn more often.
  const size_t kind = random() % (all_schedules().size() + 1);
  if (kind < all_schedules().size() && all_schedules()[kind] != ScheduleKind::hierarchical) {
    s = make_schedule(all_schedules()[kind], n);
  } else {
    const int nodes = up_to(n), per_node = std::max(nodes == 1 ? 2 : 1, n / nodes);
    s = hierarchical(nodes, per_node, random() % 2 ? ScheduleKind::two_shot : ScheduleKind::ring);
  }
  if (halves && random() % 3 == 0) s = random() % 2 ? reduce_scatter(s) : all_gather(s);
  return random() % 3 == 0 ? pipelined(s, 1 + up_to(3)) : s;
}

struct Place {
  int rank = 0, round = 0, step = 0;
};

class Mutator {
 public:
  Mutator(Schedule& s, std::mt19937_64& random) : s_(s), random_(random) {
    for (int r = 0; r < s.world; ++r) {
      for (int k = 0; k < s.num_rounds(); ++k) {
        for (int i = 0; i < std::ssize(s.rounds[r][k]); ++i) places_.push_back({r, k, i});
      }
    }
  }

  // Makes one random change. Returns a description of the change.
  std::string mutate() {
    Place a = pick(), b = pick();
    Round& round = s_.rounds[a.rank][a.round];
    Step& step = round[a.step];
    Step copy = step;
    Place other = partner(a);
    switch (random_() % 12) {
      case 0:
        round.erase(round.begin() + a.step);
        return "dropped";
      case 1:
        round.insert(round.begin() + below(std::ssize(round) + 1), copy);
        return "doubled";
      case 2:
        s_.rounds[a.rank][below(s_.num_rounds())].push_back(copy);
        return "doubled elsewhere";
      case 3:
        b.rank = a.rank;
        b.round = below(s_.num_rounds());
        if (s_.rounds[b.rank][b.round].empty()) return "nothing";
        b.step = below(std::ssize(s_.rounds[b.rank][b.round]));
        std::swap(step, at(b));
        return "swapped on a rank";
      case 4:
        b.step = below(std::ssize(round));
        std::swap(step, round[b.step]);
        return "swapped in a round";
      case 5:
        std::swap(round, s_.rounds[a.rank][below(s_.num_rounds())]);
        return "rounds swapped";
      case 6:
        step.peer = below(s_.world + 1);
        step.intra_node = a.rank / s_.per_node == step.peer / s_.per_node;
        return "misdirected";
      case 7:
        step.chunk = below(s_.chunks + 1);
        return "chunk changed";
      case 8:
        step.kind = static_cast<Step::Kind>(below(3));
        return "kind changed";
      // The cases below change both ends alike, so that only the sum can be wrong.
      case 9:
        step.chunk = at(other).chunk = below(s_.chunks);
        return "chunk changed on both sides";
      case 10:
        if (below(2) == 0) {
          erase(a);
          erase(other);
          return "dropped on both sides";
        }
        s_.rounds[other.rank][a.round].push_back(at(other));
        s_.rounds[a.rank][a.round].push_back(copy);
        return "doubled on both sides";
      default:
        Step& receive = copy.kind == Step::Kind::send ? at(other) : step;
        receive.kind =
            receive.kind == Step::Kind::recv_copy ? Step::Kind::recv_reduce : Step::Kind::recv_copy;
        return "add and copy exchanged";
    }
  }

 private:
  int below(int64_t n) { return static_cast<int>(random_() % n); }
  Place pick() { return places_[below(std::ssize(places_))]; }
  Step& at(const Place& p) { return s_.rounds[p.rank][p.round][p.step]; }
  void erase(const Place& p) {
    Round& round = s_.rounds[p.rank][p.round];
    round.erase(round.begin() + p.step);
  }

  // Returns the step at the other end of the transfer at `p`. Requires a correct schedule.
  Place partner(const Place& p) {
    const Step step = at(p);
    auto is_send = [](const Step& x) { return x.kind == Step::Kind::send; };
    const Round& round = s_.rounds[step.peer][p.round];
    for (int i = 0; i < std::ssize(round); ++i) {
      if (round[i].peer == p.rank && round[i].chunk == step.chunk && is_send(round[i]) != is_send(step))
        return {step.peer, p.round, i};
    }
    ADD_FAILURE() << "a transfer has only one end";
    return p;
  }

  Schedule& s_;
  std::mt19937_64& random_;
  std::vector<Place> places_;
};

}  // namespace gradwire::testing
