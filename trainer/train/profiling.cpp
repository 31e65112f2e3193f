#include "trainer/train/profiling.h"

#include <fmt/format.h>

#include <memory>
#include <utility>

#include "runtime/device/nvtx.h"
#include "runtime/trace/trace.h"
#include "runtime/util/parse.h"

namespace gradwire {
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
  if (tracer_) file_->keep(comm_.rank(), text());
}

}  // namespace gradwire
