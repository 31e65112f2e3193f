// Executes a schedule on integers, with one 64-bit number per rank and chunk, so that tests can compare
// execution with the checker's proof. Shares no code with the checker. Polls ranks in a random order,
// completes groups transfer by transfer, and compares the resulting numbers.
//
// A schedule is wrong in any of these cases:
//   - a rank gets stuck;
//   - the two ends of a transfer disagree on the round or the chunk;
//   - two accesses to a chunk race within a round;
//   - a contribution arrives for a sum that has already been sent;
//   - a rank's final values differ from the collective's result;
//   - a final value comes from a rank that does not own the value.
#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "collectives/schedule/schedule.h"

namespace gradwire::testing {

class Interpreter {
 public:
  Interpreter(const Schedule& schedule, uint64_t seed) : s_(schedule), random_(seed) {}

  // Executes the schedule. Returns a description of the first error, or nullopt.
  std::optional<std::string> run() {
    ranks_.resize(s_.world);
    std::vector<uint64_t> sums(s_.chunks);
    for (Rank& rank : ranks_) {
      for (int c = 0; c < s_.chunks; ++c) {
        rank.numbers.push_back(random_());
        const bool from_owner =
            s_.collective == Collective::all_gather || s_.collective == Collective::broadcast;
        if (!from_owner) {
          sums[c] += rank.numbers.back();
        } else if (&rank == &ranks_[s_.owner[c]]) {
          sums[c] = rank.numbers.back();
        }
      }
      rank.sent.assign(s_.chunks, false);
      rank.finished.assign(s_.chunks, false);
    }
    for (int r = 0; r < s_.world; ++r) {
      if (auto error = enter(r, 0)) return error;
    }
    std::vector<int> order(s_.world);
    for (int r = 0; r < s_.world; ++r) order[r] = r;
    // The execution is stuck if no rank advances in a whole pass over all ranks.
    for (bool moved = true; moved;) {
      moved = false;
      std::shuffle(order.begin(), order.end(), random_);
      for (int r : order) {
        if (auto error = advance(r, moved)) return error;
      }
    }
    for (int r = 0; r < s_.world; ++r) {
      if (ranks_[r].round < s_.num_rounds()) return fmt::format("rank {} is stuck", r);
      for (int c = 0; c < s_.chunks; ++c) {
        const bool owner = s_.owner[c] == r;
        if (s_.collective == Collective::reduce_scatter && !owner) continue;
        if (ranks_[r].numbers[c] != sums[c]) return fmt::format("rank {} has a wrong sum", r);
        if (ranks_[r].finished[c] == owner) {
          return fmt::format("rank {} {}", r, owner ? "copied what it owns" : "made up what it does not own");
        }
      }
    }
    return std::nullopt;
  }

 private:
  struct Pending {
    Step step;
    uint64_t number = 0;
    bool done = false;
  };
  struct Rank {
    int round = 0;
    std::vector<uint64_t> numbers;     // [chunk]
    std::vector<bool> sent, finished;  // [chunk]
    std::vector<Pending> group;        // transfers of the current round
  };

  // Starts round k of rank r: posts the rank's sends and checks for races.
  std::optional<std::string> enter(int r, int k) {
    Rank& me = ranks_[r];
    me.round = k;
    me.group.clear();
    if (k >= s_.num_rounds()) return std::nullopt;
    for (const Step& step : s_.rounds[r][k]) {
      if (step.peer < 0 || step.peer >= s_.world || step.peer == r) return "no such peer";
      if (step.chunk < 0 || step.chunk >= s_.chunks) return "no such chunk";
      for (const Pending& other : me.group) {
        bool same_access = other.step.kind == step.kind && step.kind != Step::Kind::recv_copy;
        if (other.step.chunk == step.chunk && !same_access) return "race";
      }
      me.group.push_back({step, me.numbers[step.chunk]});
      if (step.kind == Step::Kind::send) me.sent[step.chunk] = true;
    }
    return std::nullopt;
  }

  // Receives all posted messages for rank r. Enters the next round when the group is complete.
  std::optional<std::string> advance(int r, bool& moved) {
    Rank& me = ranks_[r];
    if (me.round >= s_.num_rounds()) return std::nullopt;
    for (Pending& mine : me.group) {
      if (mine.done || mine.step.kind == Step::Kind::send) continue;
      // Messages arrive in order: earlier receives from the same peer complete first.
      bool first = true;
      for (Pending* earlier = me.group.data(); earlier != &mine; ++earlier) {
        if (!earlier->done && earlier->step.kind != Step::Kind::send && earlier->step.peer == mine.step.peer)
          first = false;
      }
      if (!first) continue;
      Rank& peer = ranks_[mine.step.peer];
      auto offer = std::find_if(peer.group.begin(), peer.group.end(), [&](const Pending& p) {
        return !p.done && p.step.kind == Step::Kind::send && p.step.peer == r;
      });
      if (offer == peer.group.end()) continue;
      if (offer->step.chunk != mine.step.chunk || peer.round != me.round) return "the two ends disagree";
      mine.number = offer->number;
      mine.done = offer->done = moved = true;
    }
    if (!std::all_of(me.group.begin(), me.group.end(), [](const Pending& p) { return p.done; }))
      return std::nullopt;
    for (const Pending& p : me.group) {
      uint64_t& number = me.numbers[p.step.chunk];
      if (p.step.kind == Step::Kind::recv_copy) {
        number = p.number;
        me.finished[p.step.chunk] = true;
      } else if (p.step.kind == Step::Kind::recv_reduce) {
        if (me.sent[p.step.chunk] || me.finished[p.step.chunk]) return "too late for the sum";
        number += p.number;
      }
    }
    moved = true;
    return enter(r, me.round + 1);
  }

  const Schedule& s_;
  std::mt19937_64 random_;
  std::vector<Rank> ranks_;
};

}  // namespace gradwire::testing
