// Where the ranks of one process hand rank 0 the few numbers it reports: losses, test totals, parameter
// hashes.
//
// post() never blocks, so no rank's step waits for a report; only rank 0 waits, in collect(). The numbers of
// one round are those that each rank posted in the same position of its own sequence.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <mutex>
#include <string>
#include <vector>

namespace gradwire {

class Board {
 public:
  struct Entry {
    double loss = 0;   // summed over the images
    double right = 0;  // answers
    int64_t images = 0;
    uint64_t hash = 0;  // of the parameters
  };

  Board(int world, std::chrono::milliseconds timeout);

  void post(int rank, const Entry& entry);
  // The next round, in rank order. Throws CommError when a rank does not post in time, or after abort().
  std::vector<Entry> collect();
  void abort(const std::string& reason);

 private:
  const std::chrono::milliseconds timeout_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::deque<Entry>> posted_;
  std::string aborted_;  // empty: not
};

}  // namespace gradwire
