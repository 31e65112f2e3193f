// Where the ranks hand rank 0 the few numbers it reports: losses, test totals, parameter
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

#include "collectives/communicator/communicator.h"

namespace gradwire {

class Board {
 public:
  struct Entry {
    double loss = 0;   // summed over the images
    double right = 0;  // answers
    int64_t images = 0;
    uint64_t hash = 0;  // of the parameters
  };

  virtual ~Board() = default;
  virtual void post(int rank, const Entry& entry) = 0;
  // The next round, in rank order. Throws CommError when a rank does not post in time, or after abort().
  virtual std::vector<Entry> collect() = 0;
  virtual void abort(const std::string& reason) = 0;
};

// Of ranks in one process; all of them use the same object.
class LocalBoard final : public Board {
 public:
  LocalBoard(int world, std::chrono::milliseconds timeout);
  void post(int rank, const Entry& entry) override;
  std::vector<Entry> collect() override;
  void abort(const std::string& reason) override;

 private:
  const std::chrono::milliseconds timeout_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::deque<Entry>> posted_;
  std::string aborted_;  // empty: not
};

// One rank's, where ranks are processes: entries travel as the communicator's notes.
class NoteBoard final : public Board {
 public:
  explicit NoteBoard(Communicator& comm) : comm_(comm) {}
  void post(int rank, const Entry& entry) override;
  std::vector<Entry> collect() override;
  void abort(const std::string& reason) override;

 private:
  Communicator& comm_;
};

}  // namespace gradwire
