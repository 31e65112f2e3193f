#include "trainer/train/run_reporter.h"

#include <zlib.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <ranges>
#include <sstream>
#include <utility>

#include "kernels/simd/vector.h"
#include "runtime/device/device.h"
#include "runtime/device/nvtx.h"
#include "runtime/threads/running_clock.h"
#include "runtime/trace/trace.h"
#include "runtime/util/error.h"
#include "runtime/util/file.h"
#include "runtime/util/parse.h"
#include "trainer/log/records.h"
#include "trainer/measure/peaks.h"
#include "trainer/model/vit.h"

namespace gradwire {
namespace {

// Returns the number of ranks on rank 0's device. A process has a separate GPU or a share of the cores.
int64_t ranks_on_device(const TrainConfig& config) {
  return config.processes ? 1
                          : std::count(config.devices.begin(), config.devices.end(), config.devices.front());
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
                         RankReports& reports, const RunObservers& observers, int64_t images,
                         const Clock& clock)
    : config_(config),
      comm_(comm),
      reducer_(reducer),
      reports_(reports),
      observers_(observers),
      images_(images),
      clock_(clock) {}

void RunReporter::report_step(const TrainingMarks& marks, const Event& end, const double* totals,
                              int64_t epoch, double lr, const WeightShards::Sent& weights) {
  RankReports::Report mine{.loss = totals[0], .correct = totals[1], .images = images_ * config_.accumulate};
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
  StepRecord record;
  record.step = marks.step, record.epoch = epoch, record.loss = mean_loss(all), record.lr = lr;
  diverged_ = !std::isfinite(record.loss);
  if (diverged_ && !std::exchange(warned_, true)) {
    warn_once(fmt::format(
        "{}: the loss of step {} is {}; {}; try a smaller --lr or a longer --warmup",
        config_.compression.to_string(), marks.step + 1, record.loss,
        config_.ends_diverged ? "the run ends" : "training continues, in case the loss recovers"));
  }
  record.step_ms = elapsed_ms(marks.micros.front().data, end);
  clock_.trained_ms += record.step_ms;
  record.images_per_s = static_cast<double>(config_.global_batch()) / (record.step_ms * 1e-3);
  record.wire_bytes = static_cast<double>(stats.wire_bytes + weights.wire);
  record.dense_bytes = static_cast<double>(stats.dense_bytes + weights.dense);
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
                  static_cast<double>(ranks_on_device(config_) * images_ * config_.accumulate) /
                  (record.step_ms * 1e9);
  observers_.tell(&RunObserver::on_step, record);
  report_waits(marks, reports);
}

// Reports the waits. Each rank adds its waits to a report when a second has passed on the rank's clock. The
// latest reports therefore belong to the same second.
void RunReporter::report_waits(const TrainingMarks& marks, const std::vector<RankReports::Report>& reports) {
  latest_waits_.resize(reports.size());
  for (size_t rank = 0; rank < reports.size(); ++rank) {
    if (!reports[rank].waited_s.empty()) latest_waits_[rank] = reports[rank].waited_s;
  }
  const bool know_all = std::ranges::none_of(latest_waits_, std::ranges::empty);
  if (!know_all || reports[0].waited_s.empty()) return;
  if (!clock_.first_waits) clock_.first_waits = marks.wait_end;
  observers_.tell(&RunObserver::on_waits,
                  {.step = marks.step + 1,
                   .seconds = std::chrono::duration<double>(marks.wait_end - *clock_.first_waits).count(),
                   .waited_s = latest_waits_});
}

void RunReporter::report_evaluation(const RankReports::Report& mine, int64_t steps_done, double epoch) {
  reports_.post(comm_.rank(), mine);
  if (comm_.rank() != 0) return;
  const RankReports::Report all = sum(reports_.collect());
  observers_.tell(&RunObserver::on_eval, {.step = steps_done,
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
          "rank {} ended with parameters that differ from rank 0's (hash {}, rank 0 has {}): the "
          "averaged gradients were not bit-identical on all ranks",
          rank, hex(entries[rank].hash), hex(hash));
    }
  }
  std::vector<std::vector<double>> waited;
  for (RankReports::Report& entry : entries) {
    if (!entry.waited_s.empty()) waited.push_back(std::move(entry.waited_s));
  }
  observers_.tell(&RunObserver::on_end,
                  {.parameter_hash = hash,
                   .waited_s = std::move(waited),
                   .memory_bytes = memory_use(comm_.device()).peak / ranks_on_device(config_)});
}

LocalRankReports::LocalRankReports(int world, std::chrono::milliseconds timeout)
    : timeout_(timeout), posted_(static_cast<size_t>(world)) {}

void LocalRankReports::post(int rank, const Report& report) {
  std::lock_guard lock(mutex_);
  posted_[static_cast<size_t>(rank)].push_back(report);
  changed_.notify_all();
}

std::vector<RankReports::Report> LocalRankReports::collect() {
  std::unique_lock lock(mutex_);
  auto missing = [&] {
    size_t rank = 0;
    while (rank < posted_.size() && !posted_[rank].empty()) ++rank;
    return rank;
  };
  bool in_time = changed_.wait_until(lock, RunningClock::now() + timeout_,
                                     [&] { return !aborted_.empty() || missing() == posted_.size(); });
  if (!aborted_.empty()) throw CommError(aborted_);
  if (!in_time) {
    throw CommError("rank {} has not reported its step to rank 0 within {} ms", missing(), timeout_.count());
  }
  std::vector<Report> round;
  for (auto& queue : posted_) {
    round.push_back(queue.front());
    queue.pop_front();
  }
  return round;
}

void LocalRankReports::abort(const std::string& reason) {
  std::lock_guard lock(mutex_);
  if (aborted_.empty()) aborted_ = reason;
  changed_.notify_all();
}

void MessageRankReports::post(int, const Report& report) {
  std::vector<double> words{report.loss, report.correct, std::bit_cast<double>(report.images),
                            std::bit_cast<double>(report.hash)};
  words.insert(words.end(), report.waited_s.begin(), report.waited_s.end());
  comm_.send_message({reinterpret_cast<const char*>(words.data()), words.size() * sizeof(double)});
}

std::vector<RankReports::Report> MessageRankReports::collect() {
  std::vector<Report> round;
  for (int rank = 0; rank < comm_.world(); ++rank) {
    const std::string message = comm_.take_message(rank);
    std::vector<double> words(message.size() / sizeof(double));
    if (words.size() < 4 || message.size() != words.size() * sizeof(double)) {
      throw CommError("rank {}'s report cannot be read; are all ranks the same build?", rank);
    }
    std::memcpy(words.data(), message.data(), message.size());
    round.push_back({words[0],
                     words[1],
                     std::bit_cast<int64_t>(words[2]),
                     std::bit_cast<uint64_t>(words[3]),
                     {words.begin() + 4, words.end()}});
  }
  return round;
}

namespace {

// Returns a checksum of the images and labels, because two files with the same path may differ.
uint32_t checksum(const Dataset& data) {
  const auto* labels = reinterpret_cast<const unsigned char*>(data.labels.data());
  const uLong images = crc32_z(0, data.images.data(), data.images.size());
  return static_cast<uint32_t>(crc32_z(images, labels, data.labels.size() * sizeof data.labels[0]));
}

}  // namespace

std::string described_data(const DataSplits& data) {
  return fmt::format("\"images\": {} and {} with checksums {:08x} and {:08x}", data.train.count(),
                     data.test.count(), checksum(data.train), checksum(data.test));
}

std::string described_run(const TrainConfig& config, const std::string& data) {
  // Ranks with different arithmetic would compute different weights.
  const std::string arithmetic =
      config.devices[0].is_host()
          ? fmt::format("{}, {}, Gradwire {}", simd_level(), host_products_text(), GRADWIRE_VERSION)
          : "the GPU's";
  return fmt::format("{}\n{}\n\"arithmetic\": {}", config_text(config), data, arithmetic);
}

std::string first_difference(const std::string& remote, const std::string& local) {
  std::istringstream left(remote), right(local);
  std::string a, b;
  auto trimmed = [](const std::string& line) {
    size_t begin = line.find_first_not_of(' ');
    size_t end = line.find_last_not_of(" ,");
    return begin == std::string::npos ? "nothing" : line.substr(begin, end - begin + 1);
  };
  while (true) {
    bool more_left = static_cast<bool>(std::getline(left, a));
    bool more_right = static_cast<bool>(std::getline(right, b));
    if (!more_left && !more_right) return "";
    if (!more_left) a.clear();
    if (!more_right) b.clear();
    if (a != b) return fmt::format("{} there, {} here", trimmed(a), trimmed(b));
  }
}

void check_agreement(const std::string& local, Communicator& comm) {
  if (comm.rank() != 0) return comm.send_message(local);
  for (int rank = 1; rank < comm.world(); ++rank) {
    const std::string remote = comm.take_message(rank);
    if (remote == local) continue;
    throw BadInput(
        "rank {} was started with other settings or data than rank 0: {}; give all processes the "
        "same flags and data",
        rank, first_difference(remote, local));
  }
}

uint64_t parameter_hash(std::span<const float> values) {
  uint64_t hash = 0xcbf29ce484222325u;
  for (float value : values) hash = (hash ^ std::bit_cast<uint32_t>(value)) * 0x100000001b3u;
  return hash;
}

std::string hex(uint64_t value) {
  return fmt::format("{:016x}", value);
}

namespace {

TraceLabelPtr label(std::string name, std::string category) {
  return std::make_shared<const TraceLabel>(
      TraceLabel{.name = std::move(name), .category = std::move(category)});
}
TraceLabelPtr label(Activity activity) {
  return label(name(activity), name(activity));
}

}  // namespace

// Starts and stops the profiler. The profiler covers the whole process, so with ranks as threads only rank 0
// controls the profiler.
void profile(const TrainConfig& config, Communicator& comm, const Stream& stream, int64_t step) {
  const StepRange& steps = config.trace_steps;
  if (!config.profiles || (step != steps.begin && step != steps.end)) return;
  if (comm.rank() != 0 && !config.processes) return;
  stream.synchronize();
  switch_profiler(comm.device(), step == steps.begin);
}

RankTrace::RankTrace(const TrainConfig& config, Communicator& comm, TraceFile* file,
                     const SharedInstant& instant)
    : config_(config), comm_(comm), file_(file), instant_(instant) {
  if (file_ == nullptr) return;
  tracer_.emplace(comm.device(), instant.here, config.trace_steps.begin, config.trace_steps.end);
}

void RankTrace::add(const TrainingMarks& marks, const Event& end, const std::string& row,
                    const Reducer& reducer) {
  if (!tracer_ || !tracer_->traces(marks.step)) return;
  auto add = [&](const TraceLabelPtr& what, const Event& from, const Event& to) {
    tracer_->add(row, what, marks.step, from, to);
  };
  tracer_->add("host thread", label(fmt::format("enqueue step {}", marks.step), "host"), marks.step,
               marks.enqueue_begin, marks.enqueue_end);
  tracer_->add("host thread", label(fmt::format("wait for step {}", marks.step), "host"), marks.step,
               marks.wait_begin, marks.wait_end);
  add(label(fmt::format("step {}", marks.step), "step"), marks.micros.front().data, end);
  for (const TrainingMarks::Micro& micro : marks.micros) {
    add(label(Activity::batch), micro.data, micro.forward);
    add(label(Activity::forward), micro.forward, micro.backward);
    add(label(Activity::backward), micro.backward, micro.done);
  }
  for (const TrainingMarks::Update& update : marks.updates) {
    add(label("wait", "wait"), update.wait, update.begin);
    add(label(Activity::optimizer), update.begin, update.end);
  }
  if (marks.updates.empty()) {
    if (comm_.world() > 1) add(label("wait", "wait"), marks.micros.back().done, marks.reduced);
    add(label(Activity::optimizer), marks.reduced, marks.end);
  }
  reducer.trace(marks.step, *tracer_);
  if (tracer_->ends_with(marks.step)) send_spans();
}

std::string RankTrace::text() {
  const double error_us = tracer_->error_us() + instant_.error_us;
  return trace_events(comm_.rank(), comm_.device(), tracer_->take(), tracer_->dropped(), error_us);
}

// Sends the spans of a process to rank 0: first the number of messages, then messages of limited size. All
// ranks send their spans after the same step's report, so rank 0 receives these messages in order.
void RankTrace::send_spans() {
  constexpr size_t kMessageBytes = 512 << 10;
  std::string spans = text();
  if (config_.processes && comm_.rank() != 0) {
    comm_.send_message(fmt::format("{}", (spans.size() + kMessageBytes - 1) / kMessageBytes));
    for (size_t at = 0; at < spans.size(); at += kMessageBytes) {
      comm_.send_message(spans.substr(at, kMessageBytes));
    }
    return;
  }
  file_->add(comm_.rank(), std::move(spans));
  for (int rank = 1; config_.processes && rank < comm_.world(); ++rank) {
    std::string received;
    for (int left = parse_number<int>(comm_.take_message(rank)).value_or(0); left > 0; --left) {
      received += comm_.take_message(rank);
    }
    file_->add(rank, std::move(received));
  }
}

void RankTrace::keep() {
  if (tracer_) file_->add(comm_.rank(), text(), false);
}

}  // namespace gradwire
