// A run: one thread or one process per rank. When a rank fails, all ranks stop; with --elastic the other
// ranks continue.
#include "trainer/train/run.h"

#include <algorithm>
#include <chrono>
#include <exception>
#include <functional>
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
#include "trainer/train/elastic.h"
#include "trainer/train/plan_change.h"
#include "trainer/train/rank.h"
#include "trainer/train/run_reporter.h"

namespace gradwire {

namespace {

// After a plan that was questioned and kept, the next alarm must wait, twice as long each time.
constexpr int64_t kFirstQuiet = 100, kMaxQuiet = 10'000;

// Runs a rank from start to end, or until the group has grown (--elastic): one RankTrainer or, with
// --compression auto, one after another, each with the plan that was the best when it began. After an error,
// calls `abort`, so that no rank waits for another, and adds the rank's spans to the trace file.
void run_rank(TrainConfig config, const SharedRun& shared, Communicator& comm,
              const std::function<void(const std::exception&)>& abort) {
  std::optional<PlanChange> change;
  std::unique_ptr<RankTrainer> trainer;  // its destructor waits for the rank's stream: after `abort`
  try {
    while (true) {
      trainer = std::make_unique<RankTrainer>(config, shared, comm, change ? &*change : nullptr);
      if (change) change->free();
      trainer->run();
      if (!trainer->plan_change()) return;
      PlanChange next = std::move(*trainer->plan_change());
      trainer.reset();  // frees the memory that the measurement needs
      ReplanRecord& record = next.record;
      record.before = plan_flags(config);
      const RanksReport report = choose_again(config, *shared.plan, shared.data, next.weights, comm);
      apply_choice(report, config);
      config.resume.clear();  // `next` has the state
      record.step = next.position.step;
      record.after = plan_flags(config);
      record.predicted = predicted_step(report);
      record.choice = choice_record(report, shared.plan->request, config.model, record.step, record.why);
      const int64_t quiet = std::clamp(2 * (change ? change->quiet : 0), kFirstQuiet, kMaxQuiet);
      next.quiet = record.before == record.after ? quiet : 0;
      change = std::move(next);
    }
  } catch (const std::exception& error) {
    abort(error);
    if (trainer) trainer->keep_trace();
    trainer.reset();  // outside of unwinding, in which host memory is released late (Buffer)
    throw;
  }
}

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
                  const RunObservers& observers, Communicator& comm, Elastic* elastic, const AutoPlan* plan) {
  MessageRankReports reports(comm);
  InitialWeights initial(config.seed, config.init);
  Peaks peaks;
  std::optional<TraceFile> trace;
  SharedRun shared{data, observers, reports, initial, &peaks};
  shared.elastic = elastic;
  if (plan != nullptr && plan->request.replan) shared.plan = plan;
  bool began = false;
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
    began = true;
    run_rank(config, shared, comm, [&](const std::exception& error) { comm.abort(error.what()); });
    if (elastic != nullptr && elastic->has_grown()) return;
    comm.barrier();  // passes an error of rank 0 at the end to all ranks
  } catch (const std::exception& error) {
    comm.abort(error.what());
    if (began && trace) trace->write_rest(error.what());
    throw;
  }
}

// Runs to the end of the run, over successive groups.
void run_in_groups(Elastic& elastic, const DataSplits& data, const std::string& about_data,
                   const RunObservers& observers) {
  elastic.open_admission([local = described_run(elastic.launched(), about_data)](const std::string& remote) {
    return remote == local ? ""
                           : fmt::format(
                                 "it was started with other settings or data than this run: {}; give it the "
                                 "same flags and data",
                                 first_difference(remote, local));
  });
  while (true) {
    try {
      run_in_group(elastic.config(), data, about_data, observers, elastic.comm(), &elastic, nullptr);
      if (!elastic.has_grown()) return;
      elastic.move_on();
    } catch (const CommError& error) {
      if (!elastic.has_begun()) throw;
      elastic.regroup(error.what());
    }
  }
}

}  // namespace

void join_training(const TrainConfig& config, const DataSplits& data, const RunObservers& observers,
                   const std::function<std::unique_ptr<Communicator>(const std::string& about)>& join_group) {
  constexpr int kAttempts = 5;
  const std::string about_data = described_data(data);
  for (int attempt = 1;; ++attempt) {
    Elastic elastic(config);
    bool begun = false;
    try {
      elastic.join(join_group(described_run(elastic.launched(), about_data)));
      return run_in_groups(elastic, data, about_data, observers);
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

void run_training(const TrainConfig& config, const DataSplits& data, const RunObservers& observers,
                  Communicator* comm, const AutoPlan* plan) {
  if (comm != nullptr) {
    const std::string about_data = plan != nullptr ? plan->about_data : described_data(data);
    if (!config.elastic) return run_in_group(config, data, about_data, observers, *comm, nullptr, plan);
    Elastic elastic(config, *comm);
    return run_in_groups(elastic, data, about_data, observers);
  }
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
  const SharedRun shared{.data = data,
                         .observers = observers,
                         .reports = reports,
                         .initial = initial,
                         .peaks = &peaks,
                         .trace = config.trace.empty() ? nullptr : &trace,
                         .instant = {std::chrono::steady_clock::now()},
                         .plan = plan != nullptr && plan->request.replan ? plan : nullptr};
  std::mutex mutex;
  std::exception_ptr first;
  std::string why;
  // Keeps the first error, and ends all other ranks. Call inside a catch block of the rank's thread.
  const auto fail = [&](int rank, const std::exception& error) {
    std::lock_guard lock(mutex);
    if (first) return;  // later errors are consequences of the first
    why = fmt::format("rank {} failed: {}", rank, text_of(error));
    first = std::current_exception();
    reports.abort(why);
    for (auto& each : comms) each->abort(why);
  };
  const auto run_thread = [&](int rank) {
    try {
      run_rank(config, shared, *comms[static_cast<size_t>(rank)],
               [&](const std::exception& error) { fail(rank, error); });
    } catch (const std::exception& error) {
      fail(rank, error);
    }
  };
  std::vector<Thread> threads;
  try {
    threads.reserve(comms.size());
    for (int rank = 1; rank < config.ranks(); ++rank)
      threads.emplace_back(fmt::format("the thread of rank {}", rank), [&, rank] { run_thread(rank); });
  } catch (const std::exception& error) {  // the system refuses more threads
    fail(static_cast<int>(threads.size()) + 1, error);
  }
  run_thread(0);
  threads.clear();  // joins the threads
  if (first == nullptr) return;
  if (shared.trace != nullptr) trace.write_rest(why);
  std::rethrow_exception(first);
}

}  // namespace gradwire
