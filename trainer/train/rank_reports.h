// How the ranks hand rank 0 the few numbers that it logs: losses, test totals, parameter hashes.
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

class RankReports {
 public:
  struct Report {
    double loss = 0;     // summed over the images
    double correct = 0;  // answers
    int64_t images = 0;
    uint64_t hash = 0;  // of the parameters
  };

  virtual ~RankReports() = default;
  virtual void post(int rank, const Report& report) = 0;
  // The next round, in rank order. Throws CommError when a rank does not post in time, or after abort().
  virtual std::vector<Report> collect() = 0;
  virtual void abort(const std::string& reason) = 0;
};

// Of ranks in one process; all of them use the same object.
class LocalRankReports final : public RankReports {
 public:
  LocalRankReports(int world, std::chrono::milliseconds timeout);
  void post(int rank, const Report& report) override;
  std::vector<Report> collect() override;
  void abort(const std::string& reason) override;

 private:
  const std::chrono::milliseconds timeout_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::deque<Report>> posted_;
  std::string aborted_;  // empty: not
};

// One rank's, where ranks are processes: reports travel as the communicator's messages.
class MessageRankReports final : public RankReports {
 public:
  explicit MessageRankReports(Communicator& comm) : comm_(comm) {}
  void post(int rank, const Report& report) override;
  std::vector<Report> collect() override;
  void abort(const std::string& reason) override;

 private:
  Communicator& comm_;
};

}  // namespace gradwire
