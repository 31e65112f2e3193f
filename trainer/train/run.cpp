// A run: one thread or one process per rank. When a rank fails, all ranks stop; with --elastic the other
// ranks continue.
#include "trainer/train/run.h"

#include <algorithm>
#include <chrono>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "collectives/communicator/communicator.h"
#include "collectives/net/membership.h"
#include "runtime/device/device.h"
#include "runtime/threads/thread.h"
#include "runtime/util/error.h"
#include "trainer/checkpoint/checkpoint.h"
#include "trainer/checkpoint/folder.h"
#include "trainer/data/dataset.h"
#include "trainer/train/agreement.h"
#include "trainer/train/elastic.h"
#include "trainer/train/plan_change.h"
#include "trainer/train/rank.h"

namespace gradwire {

// A rank's run from start to end: one RankTrainer or, with --compression auto, one after another, each with
// the plan that was the best when it began.

class RankRun {
 public:
  // Prepares a run. `shared` and `comm` must outlive the object.
  RankRun(const SharedRun& shared, Communicator& comm);
  ~RankRun();
  RankRun(const RankRun&) = delete;

  // Trains to the end of the run or, with --elastic, until the group has grown.
  void run();
  // Adds this rank's spans to the trace file after a failure.
  void keep_trace();

 private:
  void replan();

  TrainConfig config_;  // with the latest plan
  SharedRun shared_;
  Communicator& comm_;
  std::optional<PlanChange> plan_change_;
  std::optional<ReplanRecord> record_;
  int64_t quiet_ = 0;  // steps before the next plan may be questioned
  std::unique_ptr<RankTrainer> trainer_;
};

namespace {

// Keeps the first error, and aborts all other ranks.
class Failure {
 public:
  Failure(std::vector<std::unique_ptr<Communicator>>& comms, RankReports& reports)
      : comms_(comms), reports_(reports) {}

  // Records the current exception as the failure of `rank`. Call inside a catch block of the rank's thread.
  void report(int rank) {
    std::lock_guard lock(mutex_);
    if (first_) return;  // later errors are consequences of the first
    first_ = std::current_exception();
    text_ = fmt::format("rank {} failed", rank);
    try {
      throw;
    } catch (const std::exception& error) {
      text_ += fmt::format(": {}", text_of(error));
    } catch (...) {
    }
    reports_.abort(text_);
    for (auto& comm : comms_) comm->abort(text_);
  }

  bool happened() const { return first_ != nullptr; }
  const std::string& text() const { return text_; }
  void rethrow() {
    if (first_) std::rethrow_exception(first_);
  }

 private:
  std::vector<std::unique_ptr<Communicator>>& comms_;
  RankReports& reports_;
  std::mutex mutex_;
  std::exception_ptr first_;
  std::string text_;
};

void check(const TrainConfig& config, const DataSplits& data) {
  auto positive = [](const char* what, int64_t value) {
    if (value < 1) throw BadInput("{} is {}, at least 1 is needed", what, value);
  };
  positive("ranks", config.ranks());
  positive("batch size", config.batch_size);
  positive("accumulate", config.accumulate);
  positive("steps", config.steps);
  positive("evaluation batch size", config.eval_batch_size);
  if (!config.checkpoint_directory.empty()) {
    positive("checkpoint every", config.checkpoint_every);
    positive("checkpoints to keep", config.checkpoint_keep);
  }
  check_model(config.model);
  check_model_fits(config.model, data.train);
  if (!config.resume.empty()) compare_with_head(config, read_head(config.resume));
}

// Locks the checkpoint folder. Rank 0 holds the lock while it may write checkpoints. `takes_over`: takes the
// lock from a lost rank 0.
std::optional<FolderLock> lock_checkpoints(const TrainConfig& config, bool takes_over = false) {
  if (config.checkpoint_directory.empty()) return std::nullopt;
  return std::optional<FolderLock>(std::in_place, config.checkpoint_directory, takes_over);
}

// Runs this process's part of a run as one rank of a group, to the end of the run or until the group fails or
// grows. `about_data`: the result of described_data().
void run_in_group(const TrainConfig& config, const DataSplits& data, const std::string& about_data,
                  RunObserver& observer, Communicator& comm, Elastic* elastic, const AutoPlan* plan) {
  std::unique_ptr<RankRun> run;
  MessageRankReports reports(comm);
  InitialWeights initial(config.seed, config.init);
  Peaks peaks;
  std::optional<TraceFile> trace;
  SharedRun shared{config, data, observer, reports, initial, &peaks, nullptr};
  shared.elastic = elastic;
  if (plan != nullptr && plan->request.replan) shared.plan = plan;
  try {
    if (!config.trace.empty()) shared.trace = &trace.emplace(config, comm.rank());
    if (elastic != nullptr && !elastic->agree()) return;
    check(config, data);
    if (elastic == nullptr || !elastic->start()) reset_memory_peak(comm.device());
    const std::string about_plan =
        plan != nullptr ? fmt::format("\n\"auto\": {}", plan->request.to_string()) : "";
    check_agreement(described_run(config, about_data) + about_plan, comm);
    const bool takes_over = elastic != nullptr && elastic->takes_over();
    const std::optional<FolderLock> lock =
        comm.rank() == 0 ? lock_checkpoints(config, takes_over) : std::nullopt;
    if (elastic != nullptr) elastic->post_members();
    if (shared.trace != nullptr) shared.instant = agree_on_instant(comm.transport());
    if (config.ranks_per_node > 0) {
      comm.set_ranks_per_node(config.ranks_per_node);
    } else {
      comm.agree_on_ranks_per_node(config.ranks_here);
    }
    if (config.measure_peak) {  // rank 0 measures while the other ranks are idle
      comm.barrier();
      if (comm.rank() == 0) peaks = measure_peaks(comm.device(), config.precision);
      comm.barrier();
    }
    run = std::make_unique<RankRun>(shared, comm);
    run->run();
    if (elastic != nullptr && elastic->has_grown()) return;
    comm.barrier();  // passes an error of rank 0 at the end to all ranks
  } catch (const std::exception& error) {
    comm.abort(error.what());
    if (run && shared.trace != nullptr) {
      run->keep_trace();
      trace->write_rest(error.what());
    }
    run.reset();  // waits for the rank's stream, so this must follow the abort
    throw;
  }
}

// Runs to the end of the run, over successive groups.
void run_in_groups(Elastic& elastic, const DataSplits& data, const std::string& about_data,
                   RunObserver& observer) {
  elastic.open_admission([local = described_run(elastic.launched(), about_data)](const std::string& remote) {
    return remote == local ? ""
                           : fmt::format(
                                 "it was started with other settings or data than this run: {}; give it the "
                                 "same flags and data",
                                 first_difference(remote, local));
  });
  while (true) {
    try {
      run_in_group(elastic.config(), data, about_data, observer, elastic.comm(), &elastic, nullptr);
      if (!elastic.has_grown()) return;
      elastic.move_on();
    } catch (const CommError& error) {
      if (!elastic.has_begun()) throw;
      elastic.regroup(error.what());
    }
  }
}

}  // namespace

void run_training(const TrainConfig& config, const DataSplits& data, RunObserver& observer,
                  Communicator& comm, const AutoPlan* plan) {
  const std::string about_data = plan != nullptr ? plan->about_data : described_data(data);
  if (!config.elastic) return run_in_group(config, data, about_data, observer, comm, nullptr, plan);
  Elastic elastic(config, comm);
  run_in_groups(elastic, data, about_data, observer);
}

void join_training(const TrainConfig& config, const DataSplits& data, RunObserver& observer,
                   const std::function<std::unique_ptr<Communicator>(const std::string& about)>& join_group) {
  constexpr int kAttempts = 5;
  const std::string about_data = described_data(data);
  for (int attempt = 1;; ++attempt) {
    Elastic elastic(config);
    bool begun = false;
    try {
      elastic.join(join_group(described_run(elastic.launched(), about_data)));
      return run_in_groups(elastic, data, about_data, observer);
    } catch (const NoRankAnswers&) {
      throw;
    } catch (const CommError&) {
      // A joiner without state is expendable and retries. The failure of a joiner with state is a failure of
      // the run.
      begun = elastic.has_begun();
      if (begun || attempt == kAttempts) throw;
    }
  }
}

void run_training(const TrainConfig& config, const DataSplits& data, RunObserver& observer,
                  const AutoPlan* plan) {
  check(config, data);
  for (Device device : config.devices) reset_memory_peak(device);
  const std::optional<FolderLock> lock = lock_checkpoints(config);
  const auto timeout = std::chrono::milliseconds(static_cast<int64_t>(config.timeout_s * 1e3));
  auto comms = create_local_ranks(config.devices, timeout, config.link);
  for (auto& comm : comms) comm->set_ranks_per_node(config.ranks_per_node);
  LocalRankReports reports(config.ranks(), timeout);
  InitialWeights initial(config.seed, config.init);
  const Peaks peaks = config.measure_peak ? measure_peaks(config.devices.front(), config.precision) : Peaks{};
  TraceFile trace(config);
  const SharedRun shared{.config = config,
                         .data = data,
                         .observer = observer,
                         .reports = reports,
                         .initial = initial,
                         .peaks = &peaks,
                         .trace = config.trace.empty() ? nullptr : &trace,
                         .instant = {std::chrono::steady_clock::now()},
                         .plan = plan != nullptr && plan->request.replan ? plan : nullptr};
  Failure failure(comms, reports);

  auto run_rank = [&](int rank) {
    RankRun run(shared, *comms[static_cast<size_t>(rank)]);
    try {
      run.run();
    } catch (...) {
      failure.report(rank);
      run.keep_trace();
    }
    // The destructor waits for the rank's stream, so after a failure it must follow the abort.
  };
  std::vector<Thread> threads;
  try {
    threads.reserve(static_cast<size_t>(config.ranks()));
    for (int rank = 1; rank < config.ranks(); ++rank) {
      threads.emplace_back(fmt::format("the thread of rank {}", rank), [&run_rank, rank] { run_rank(rank); });
    }
  } catch (...) {  // the system refuses more threads
    failure.report(static_cast<int>(threads.size()) + 1);
  }
  run_rank(0);
  threads.clear();  // joins the threads
  if (shared.trace != nullptr && failure.happened()) trace.write_rest(failure.text());
  failure.rethrow();
}

namespace {

// After a plan that was questioned and kept, the next alarm must wait, twice as long each time.
constexpr int64_t kFirstQuiet = 100, kMostQuiet = 10'000;

}  // namespace

RankRun::RankRun(const SharedRun& shared, Communicator& comm)
    : config_(shared.config),
      shared_{.config = config_,
              .data = shared.data,
              .observer = shared.observer,
              .reports = shared.reports,
              .initial = shared.initial,
              .peaks = shared.peaks,
              .trace = shared.trace,
              .instant = shared.instant,
              .elastic = shared.elastic,
              .plan = shared.plan},
      comm_(comm) {}

RankRun::~RankRun() = default;

void RankRun::run() {
  while (true) {
    trainer_ = std::make_unique<RankTrainer>(shared_, comm_);
    if (plan_change_) plan_change_->free();
    trainer_->run();
    if (!trainer_->plan_change()) return;
    plan_change_ = std::move(trainer_->plan_change());
    trainer_.reset();  // frees the memory that the measurement needs
    replan();
  }
}

void RankRun::replan() {
  const std::string before = plan_flags(config_);
  const RanksReport report = choose_again(config_, *shared_.plan, shared_.data, plan_change_->weights, comm_);
  apply_choice(report, config_);
  config_.resume.clear();  // plan_change_ has the state
  const int64_t step = plan_change_->position.step;
  record_ = {.step = step,
             .why = plan_change_->why,
             .before = before,
             .after = plan_flags(config_),
             .predicted = predicted_step(report),
             .choice = choice_record(report, shared_.plan->request, config_.model, step, plan_change_->why)};
  quiet_ = record_->before == record_->after ? std::clamp(2 * quiet_, kFirstQuiet, kMostQuiet) : 0;
  shared_.plan_change = &*plan_change_;
  shared_.replanned = &*record_;
  shared_.quiet = quiet_;
}

void RankRun::keep_trace() {
  if (trainer_) trainer_->keep_trace();
}

}  // namespace gradwire
