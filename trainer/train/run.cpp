// A run: one thread per rank, and an end for all of them when one fails.
#include "trainer/run.h"

#include <chrono>
#include <exception>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "collectives/communicator.h"
#include "kernels/error.h"
#include "trainer/data/dataset.h"
#include "trainer/train/rank.h"

namespace gradwire {
namespace {

// Keeps the first error, and makes every other rank end with it.
class Failure {
 public:
  Failure(std::vector<std::unique_ptr<Communicator>>& comms, Board& board) : comms_(comms), board_(board) {}

  // Called inside a catch block by the rank's thread.
  void report(int rank) {
    std::lock_guard lock(mutex_);
    if (first_) return;  // what follows a failure is only its echo
    first_ = std::current_exception();
    std::string reason = "rank " + std::to_string(rank) + " failed";
    try {
      throw;
    } catch (const std::exception& error) {
      reason += std::string(": ") + error.what();
    } catch (...) {
    }
    board_.abort(reason);
    for (auto& comm : comms_) comm->abort(reason);
  }

  void rethrow() {
    if (first_) std::rethrow_exception(first_);
  }

 private:
  std::vector<std::unique_ptr<Communicator>>& comms_;
  Board& board_;
  std::mutex mutex_;
  std::exception_ptr first_;
};

void check(const TrainConfig& config, const DataSplits& data) {
  auto positive = [](const char* what, int64_t value) {
    if (value < 1)
      throw BadInput(std::string(what) + " is " + std::to_string(value) + ", at least 1 is needed");
  };
  positive("ranks", config.ranks());
  positive("batch size", config.batch_size);
  positive("accumulate", config.accumulate);
  positive("steps", config.steps);
  positive("evaluation batch size", config.eval_batch_size);
  check_model(config.model);
  check_model_fits(config.model, data.train);
}

}  // namespace

void run_training(const TrainConfig& config, const DataSplits& data, RunObserver& observer) {
  check(config, data);
  const auto timeout = std::chrono::milliseconds(static_cast<int64_t>(config.timeout_s * 1e3));
  auto comms = Communicator::create_local(config.devices, timeout);
  Board board(config.ranks(), timeout);
  InitialWeights initial(config.seed);
  const SharedRun shared{config, data, observer, board, initial};
  Failure failure(comms, board);

  auto run_rank = [&](int rank) {
    std::unique_ptr<RankTrainer> trainer;
    try {
      trainer = std::make_unique<RankTrainer>(shared, *comms[static_cast<size_t>(rank)]);
      trainer->run();
    } catch (...) {
      failure.report(rank);
    }
    // Only now, when the communicator is aborted after a failure: this waits for the rank's stream.
    trainer.reset();
  };
  std::vector<std::jthread> threads;
  try {
    for (int rank = 1; rank < config.ranks(); ++rank) threads.emplace_back(run_rank, rank);
  } catch (...) {  // no more threads to be had
    failure.report(static_cast<int>(threads.size()) + 1);
  }
  run_rank(0);
  threads.clear();  // joins
  failure.rethrow();
}

}  // namespace gradwire
