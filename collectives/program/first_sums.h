// Determines the round in which each rank first adds to a chunk. In earlier rounds the rank sends only its
// part, not a sum of parts. Internal to collectives/program.
#pragma once

#include <climits>
#include <vector>

#include "collectives/schedule/schedule.h"

namespace gradwire {

class FirstSums {
 public:
  explicit FirstSums(const Schedule& schedule)
      : schedule_(schedule), first_(static_cast<size_t>(schedule.world)) {}

  // Returns whether `rank` sends only its own part of the chunk in this round.
  bool sends_a_part(int rank, int chunk, int round) {
    std::vector<int>& first = first_[static_cast<size_t>(rank)];
    if (first.empty()) first = first_sums(rank);
    return first[static_cast<size_t>(chunk)] >= round;
  }

 private:
  std::vector<int> first_sums(int rank) const {
    std::vector<int> first(static_cast<size_t>(schedule_.chunks), INT_MAX);
    const auto& rounds = schedule_.rounds[static_cast<size_t>(rank)];
    for (int k = static_cast<int>(rounds.size()); k-- > 0;) {
      for (const Step& step : rounds[static_cast<size_t>(k)]) {
        if (step.kind == Step::Kind::recv_reduce) first[static_cast<size_t>(step.chunk)] = k;
      }
    }
    return first;
  }

  const Schedule& schedule_;
  std::vector<std::vector<int>> first_;  // [rank][chunk]: a round; empty until requested
};

}  // namespace gradwire
