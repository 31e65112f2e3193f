// Reports of a reducer: statistics and traces of its steps, state, memory, configuration.
#include "collectives/reducer/report.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "collectives/reducer/reducer.h"
#include "runtime/util/error.h"

namespace gradwire {
namespace {

// Returns a text such as "schedule two_shot (fastest: 1.2 ms predicted, ring 1.9 ms)" for each allreduce.
std::string plan_text(const BucketPipeline& pipeline) {
  std::string text;
  for (const auto& [what, choice] : pipeline.plan()) {
    text += fmt::format("{}{}{}schedule {} ({})", text.empty() ? "" : "; ", what, what.empty() ? "" : ": ",
                        name(choice->schedule.kind), choice->reason);
  }
  return text;
}

}  // namespace

ReducerStats Reducer::stats(int64_t step) const {
  if (buckets_.empty()) return {};
  const StepMarks& marks = marks_of(step);
  ReducerStats stats{.wire_bytes = (*marks.bytes_sent)[1] - (*marks.bytes_sent)[0],
                     .dense_bytes = dense_bytes_};
  if (!options_.timing) return stats;
  std::vector<std::pair<double, double>> spans;
  for (const BucketPhases& b : marks.buckets) {
    spans.push_back(b.since(marks.buckets[marks.first]));
    stats.compress_ms += b.ms(Phase::compress);
    stats.communicate_ms += b.ms(Phase::communicate);
    stats.decompress_ms += b.ms(Phase::decompress);
  }
  std::sort(spans.begin(), spans.end());  // buckets may have run in another order
  double until = 0;                       // latest end of a bucket so far, in ms since the first bucket began
  for (const auto& [begin, end] : spans) {
    stats.comm_ms += std::max(0.0, end - std::max(begin, until));
    until = std::max(until, end);
  }
  stats.exposed_comm_ms = elapsed_ms(marks.wait_begin, marks.wait_end);
  return stats;
}

void Reducer::trace(int64_t step, Tracer& tracer) const {
  if (buckets_.empty() || !options_.timing) return;
  const StepMarks& marks = marks_of(step);
  for (size_t b = 0; b < buckets_.size(); ++b) {
    marks.buckets[b].trace(tracer, lanes_[buckets_[b].lane].stream.name(), step,
                           {{"bucket", static_cast<int64_t>(b)},
                            {"spec", spec_.to_string()},
                            {"bucket_bytes", buckets_[b].elements() * 4}});
  }
  tracer.collect(step);
}

const StepMarks& Reducer::marks_of(int64_t step) const {
  // A graph's marks are stored with the step in which it was captured.
  auto found = std::ranges::find(marks_, step, &StepMarks::step);
  if (step < first_step_ || step >= step_ || found == marks_.end()) {
    throw BadInput("Reducer::stats: step {} is not one of the last {} of {}", step, kStatsKept, step_);
  }
  return *found;
}

std::vector<TensorState> Reducer::tensor_state() const {
  std::vector<TensorState> all;
  for (const Bucket& b : buckets_) {
    const auto begin = static_cast<std::ptrdiff_t>(all.size());
    const Residual* residual = b.pipeline->residual();
    for (int i = b.first_tensor; residual != nullptr && i < b.last_tensor; ++i) {
      if (tensors_[i].count() == 0) continue;
      const int64_t first = layout_.offsets[i] - b.begin;
      all.push_back({.tensor = i,
                     .kind = kResidualKind,
                     .residual = residual,
                     .first = first,
                     .shape = tensors_[i].shape});
    }
    for (TensorState& s : b.pipeline->tensor_state()) {
      if (s.tensor < b.first_tensor || s.tensor >= b.last_tensor || s.kind == kResidualKind) {
        throw Error(
            "a codec has state '{}' of tensor {}, but the tensor is not in its bucket or the name is "
            "reserved for the residual",
            s.kind, s.tensor);
      }
      all.push_back(std::move(s));
    }
    std::ranges::stable_sort(all.begin() + begin, all.end(), {}, &TensorState::tensor);
  }
  return all;
}

ReducerMemory Reducer::memory() const {
  ReducerMemory memory;
  for (const Lane& lane : lanes_) {
    memory.staging += static_cast<int64_t>(lane.workspace.bytes() + lane.staging.bytes());
  }
  for (const Bucket& b : buckets_) {
    const int64_t residual = b.pipeline->residual() != nullptr ? b.pipeline->residual()->bytes() : 0;
    memory.residual += residual;
    memory.factors += b.pipeline->state_bytes() - residual;
  }
  return memory;
}

std::string Reducer::describe() const {
  if (buckets_.empty()) return "world of 1: gradients are unchanged\n";
  std::string text;
  for (size_t b = 0; b < buckets_.size(); ++b) {
    const Bucket& bucket = buckets_[b];
    text += fmt::format("bucket {}: {} tensors, {} bytes; {}; {}\n", b, bucket.tensors(),
                        bucket.elements() * 4, bucket.pipeline->describe(), plan_text(*bucket.pipeline));
  }
  if (const std::string links = links_text(); !links.empty()) text += links + "\n";
  return text;
}

std::string Reducer::schedule() const {
  std::vector<std::string> kinds;
  for (const Bucket& b : buckets_) {
    for (const auto& [what, choice] : b.pipeline->plan()) {
      const char* const kind = name(choice->schedule.kind);
      if (std::find(kinds.begin(), kinds.end(), kind) == kinds.end()) kinds.emplace_back(kind);
    }
  }
  std::string all;
  for (const std::string& kind : kinds) all += (all.empty() ? "" : "+") + kind;
  return all.empty() ? "none" : all;
}

std::string Reducer::schedule_reason() const {
  if (buckets_.empty()) return "a world of 1";
  std::string text = plan_text(*std::ranges::max_element(buckets_, {}, &Bucket::elements)->pipeline);
  if (const std::string links = links_text(); !links.empty()) text += "; " + links;
  return text;
}

// Returns the link costs from which the schedule was chosen; "" if the planner had no alternative.
std::string Reducer::links_text() const {
  if (spec_.schedule != ScheduleKind::automatic || comm_.world() <= 2) return "";
  const LinkCosts& costs = planner_->costs();
  return (costs.measured ? "links measured: " : "links not measured, assumed: ") + costs.to_string();
}

}  // namespace gradwire
