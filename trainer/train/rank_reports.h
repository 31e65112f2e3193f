// Sends each rank's numbers for the log to rank 0: losses, test totals, parameter hashes.
//
// post() never blocks, so no step waits for a report. Only collect() on rank 0 blocks. Round k consists of
// the k-th report of every rank.
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
    double loss = 0;     // sum over the images
    double correct = 0;  // correct answers
    int64_t images = 0;
    uint64_t hash = 0;                  // hash of the parameters
    std::vector<double> waited_s = {};  // seconds waited for each rank so far; may be empty
  };

  virtual ~RankReports() = default;
  virtual void post(int rank, const Report& report) = 0;
  // Returns the reports of the next round, in rank order. Blocks until every rank has posted its report.
  // Throws CommError if a rank does not post in time, or after abort().
  virtual std::vector<Report> collect() = 0;
  virtual void abort(const std::string& reason) = 0;
};

// Reports of ranks that are threads of one process. All ranks share one object.
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
  std::string aborted_;  // the reason; empty while not aborted
};

// Reports of ranks that are processes. Each rank has a separate object, which sends the reports as messages
// of the communicator.
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
