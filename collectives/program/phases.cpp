#include "collectives/program/phases.h"

#include <fmt/format.h>

namespace gradwire {
namespace {

Activity activity(Phase phase) {
  return phase == Phase::compress      ? Activity::compress
         : phase == Phase::communicate ? Activity::communicate
                                       : Activity::decompress;
}

}  // namespace

// Appends a segment that begins now. Creates events in the first steps and reuses the events in later steps.
BucketPhases::Segment& BucketPhases::next(const Stream& stream) {
  if (used_ == segments_.size()) segments_.emplace_back().begin = Event::create_timer(stream.device());
  Segment& segment = segments_[used_++];
  segment.begin.record(stream);
  return segment;
}

void BucketPhases::begin(const Stream& stream) {
  stream_ = stream;
  used_ = 0;
  entered_ = false;
  if (!options_.timing) return;
  Segment& first = next(stream);
  first.phase = Phase::compress;
  first.allreduce = nullptr;
}

void BucketPhases::enter(const Stream& stream, Phase phase, const ProgramInfo* allreduce) {
  if (!stream_ || !(stream == stream_)) return;
  if (options_.timing) {
    Segment* current = &segments_[used_ - 1];
    if (entered_ && current->phase == phase && current->allreduce == allreduce) return;
    if (entered_) current = &next(stream);  // otherwise nothing has been enqueued since begin()
    current->phase = phase;
    current->allreduce = allreduce;
  }
  entered_ = true;
  range_.reset();  // end the previous range before the next begins
  range_.emplace(activity(phase), options_.bucket);
}

void BucketPhases::end() {
  range_.reset();
  if (options_.timing) next(stream_);
  stream_ = {};
}

std::pair<double, double> BucketPhases::since(const BucketPhases& first) const {
  if (used_ < 2 || first.used_ < 2) return {0, 0};
  const Event& zero = first.segments_[0].begin;
  return {elapsed_ms(zero, segments_[0].begin), elapsed_ms(zero, segments_[used_ - 1].begin)};
}

double BucketPhases::ms(Phase phase) const {
  double sum = 0;
  for (size_t i = 0; i + 1 < used_; ++i) {
    if (segments_[i].phase == phase) sum += elapsed_ms(segments_[i].begin, segments_[i + 1].begin);
  }
  return sum;
}

void BucketPhases::trace(Tracer& tracer, const std::string& row, int64_t step,
                         const std::vector<std::pair<std::string, TraceLabel::Value>>& details) const {
  for (size_t i = 0; i + 1 < used_; ++i) {
    const Segment& segment = segments_[i];
    const char* phase = name(activity(segment.phase));
    TraceLabel label{
        .name = fmt::format("{} {}", phase, options_.bucket), .category = phase, .details = details};
    if (const ProgramInfo* allreduce = segment.allreduce) {
      if (!allreduce->part.empty()) label.details.emplace_back("part", allreduce->part);
      label.details.emplace_back("schedule", allreduce->schedule);
      label.details.emplace_back("sent_bytes", allreduce->bytes_sent);
      label.details.emplace_back("exchanges", int64_t{allreduce->exchanges});
      label.details.emplace_back("slices", int64_t{allreduce->slices});
    }
    tracer.add(row, std::make_shared<const TraceLabel>(std::move(label)), step, segment.begin,
               segments_[i + 1].begin);
  }
}

}  // namespace gradwire
