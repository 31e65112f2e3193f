#include "trainer/train/run_reporter.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "runtime/device/device.h"
#include "runtime/util/error.h"
#include "runtime/util/file.h"
#include "trainer/model/vit.h"
#include "trainer/train/parameter_hash.h"

namespace gradwire {
namespace {

// Returns the images per step on rank 0's device, over all ranks of the device, if each rank has `images` per
// batch. With a process per rank, each rank has a separate GPU or a share of the cores.
int64_t images_per_device(const TrainConfig& config, int64_t images) {
  const auto here = std::count(config.devices.begin(), config.devices.end(), config.devices.front());
  return (config.processes ? 1 : here) * images * config.accumulate;
}

// Returns the sum of the reports in rank order, so that the rounding is the same in every run.
RankReports::Report sum(const std::vector<RankReports::Report>& entries) {
  RankReports::Report all;
  for (const RankReports::Report& entry : entries) {
    all.loss += entry.loss;
    all.correct += entry.correct;
    all.images += entry.images;
  }
  return all;
}

// Returns the mean. NaN has no sign, which the processor sets at random.
double mean_loss(const RankReports::Report& all) {
  const double mean = all.loss / static_cast<double>(all.images);
  return std::isnan(mean) ? std::numeric_limits<double>::quiet_NaN() : mean;
}

}  // namespace

RunReporter::RunReporter(const TrainConfig& config, Communicator& comm, const Reducer& reducer,
                         RankReports& reports, RunObserver& observer, int64_t images, const Clock& clock)
    : config_(config),
      comm_(comm),
      reducer_(reducer),
      reports_(reports),
      observer_(observer),
      images_(images),
      clock_(clock) {}

void RunReporter::report_step(const FinishedStep& step) {
  const TrainingMarks& marks = step.marks;
  RankReports::Report mine{
      .loss = step.totals[0], .correct = step.totals[1], .images = images_ * config_.accumulate};
  constexpr std::chrono::seconds kBetweenWaits{1};
  if (comm_.world() > 1 && marks.wait_end >= next_waits_) {
    mine.waited_s = comm_.waited_s();
    next_waits_ = marks.wait_end + kBetweenWaits;
  }
  reports_.post(comm_.rank(), mine);
  if (comm_.rank() != 0) return;

  const std::vector<RankReports::Report> reports = reports_.collect();
  const RankReports::Report all = sum(reports);
  ReducerStats stats = reducer_.stats(marks.step);
  StepRecord record{.step = marks.step, .epoch = step.epoch, .loss = mean_loss(all), .lr = step.lr};
  diverged_ = !std::isfinite(record.loss);
  if (diverged_ && !std::exchange(warned_, true)) {
    warn_once(fmt::format(
        "{}: the loss of step {} is {}; {}; try a smaller --lr or a longer --warmup",
        config_.compression.to_string(), marks.step + 1, record.loss,
        config_.ends_diverged ? "the run ends" : "training continues, in case the loss recovers"));
  }
  record.step_ms = elapsed_ms(marks.micros.front().data, step.end);
  clock_.trained_ms += record.step_ms;
  record.images_per_s = static_cast<double>(config_.global_batch()) / (record.step_ms * 1e-3);
  record.wire_bytes = stats.wire_bytes + step.weights.wire;
  record.dense_bytes = stats.dense_bytes + step.weights.dense;
  record.comm_ms = stats.comm_ms;
  record.compress_ms = stats.compress_ms;
  record.communicate_ms = stats.communicate_ms;
  record.decompress_ms = stats.decompress_ms;
  record.exposed_comm_ms = stats.exposed_comm_ms;
  for (const TrainingMarks::Micro& micro : marks.micros) {
    record.data_ms += elapsed_ms(micro.data, micro.forward);
    record.forward_ms += elapsed_ms(micro.forward, micro.backward);
  }
  record.backward_ms = marks.backward_ms();
  record.optimizer_ms = elapsed_ms(marks.reduced, marks.end);
  for (const TrainingMarks::Update& update : marks.updates) {
    record.exposed_comm_ms += elapsed_ms(update.wait, update.begin);
    record.optimizer_ms += elapsed_ms(update.begin, update.end);
  }
  record.forward_ms -= updated_ms_;
  updated_ms_ = marks.updated_in_forward ? record.exposed_comm_ms + record.optimizer_ms : 0;
  record.tflops = training_flops_per_image(config_.model) *
                  static_cast<double>(images_per_device(config_, images_)) / (record.step_ms * 1e9);
  observer_.on_step(record);
  report_waits(marks, reports);
}

// Reports the waits. Each rank adds its waits to a report when a second has passed on the rank's clock. The
// latest reports therefore belong to the same second.
void RunReporter::report_waits(const TrainingMarks& marks, const std::vector<RankReports::Report>& reports) {
  latest_waits_.resize(reports.size());
  for (size_t rank = 0; rank < reports.size(); ++rank) {
    if (!reports[rank].waited_s.empty()) latest_waits_[rank] = reports[rank].waited_s;
  }
  const bool know_all =
      std::none_of(latest_waits_.begin(), latest_waits_.end(), [](const auto& of) { return of.empty(); });
  if (!know_all || reports[0].waited_s.empty()) return;
  if (!clock_.first_waits) clock_.first_waits = marks.wait_end;
  observer_.on_waits({.step = marks.step + 1,
                      .seconds = std::chrono::duration<double>(marks.wait_end - *clock_.first_waits).count(),
                      .waited_s = latest_waits_});
}

void RunReporter::report_evaluation(const RankReports::Report& mine, int64_t steps_done, double epoch) {
  reports_.post(comm_.rank(), mine);
  if (comm_.rank() != 0) return;
  const RankReports::Report all = sum(reports_.collect());
  observer_.on_eval({.step = steps_done,
                     .epoch = epoch,
                     .seconds = clock_.trained_ms * 1e-3,
                     .test_loss = mean_loss(all),
                     .test_accuracy = all.correct / static_cast<double>(all.images),
                     .images = all.images});
}

void RunReporter::report_end(uint64_t hash) {
  reports_.post(comm_.rank(),
                {.hash = hash, .waited_s = comm_.world() > 1 ? comm_.waited_s() : std::vector<double>{}});
  if (comm_.rank() != 0) return;
  std::vector<RankReports::Report> entries = reports_.collect();
  for (size_t rank = 1; rank < entries.size(); ++rank) {
    if (entries[rank].hash != hash) {
      throw Error(
          fmt::format("rank {} ended with parameters that differ from rank 0's (hash {}, rank 0 has {}): the "
                      "averaged gradients were not bit-identical on all ranks",
                      rank, hex(entries[rank].hash), hex(hash)));
    }
  }
  std::vector<std::vector<double>> waited;
  for (RankReports::Report& entry : entries) {
    if (!entry.waited_s.empty()) waited.push_back(std::move(entry.waited_s));
  }
  // Count the ranks that share rank 0's device. Ranks that are processes do not share device memory.
  const auto here =
      config_.processes ? 1 : std::count(config_.devices.begin(), config_.devices.end(), comm_.device());
  observer_.on_end({.parameter_hash = hash,
                    .waited_s = std::move(waited),
                    .memory_bytes = memory_use(comm_.device()).peak / here});
}

}  // namespace gradwire
