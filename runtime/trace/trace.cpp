#include "runtime/trace/trace.h"

#include <cmath>
#include <limits>

#include "runtime/device/device_impl.h"
#include "runtime/util/error.h"

namespace gradwire {
namespace {

int64_t ns_between(SteadyTime from, SteadyTime to) {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(to - from).count();
}

}  // namespace

Tracer::Tracer(Device device, SteadyTime origin, int64_t first_step, int64_t end_step)
    : device_(device), origin_(origin), first_step_(first_step), end_step_(end_step) {}

void Tracer::begin_step(int64_t step, bool finer) {
  step_ = step;
  recording_ = traces(step) && finer;
  if (traces(step) && !reference_) calibrate();
}

// Several times records an event on an idle stream between two readings of the host's clock; uses the closest
// pair of readings. On the host, this thread records the event, with the same clock.
void Tracer::calibrate() {
  const Stream idle =
      device_.is_host() ? Stream::immediate_host() : Stream::create(device_, "clock calibration");
  int64_t closest = std::numeric_limits<int64_t>::max();
  for (int i = 0; i < 8; ++i) {
    Event mark = Event::create_timer(device_);
    const auto before = std::chrono::steady_clock::now();
    mark.record(idle);
    idle.synchronize();
    const auto after = std::chrono::steady_clock::now();
    const int64_t apart = ns_between(before, after);
    if (apart >= closest) continue;
    closest = apart;
    reference_ = mark;
    reference_ns_ = ns_between(origin_, before) + apart / 2;
    error_ns_ = apart / 2;
  }
}

int64_t Tracer::ns(const Event& event) const {
  return reference_ns_ + std::llround(elapsed_ms(reference_, event) * 1e6);
}

void Tracer::add(const std::string& row, TraceLabelPtr label, int64_t step, const Event& begin,
                 const Event& end) {
  std::lock_guard lock(mutex_);
  keep({row, std::move(label), step, ns(begin), ns(end)});
}

void Tracer::add(const std::string& row, TraceLabelPtr label, int64_t step, SteadyTime begin,
                 SteadyTime end) {
  std::lock_guard lock(mutex_);
  keep({row, std::move(label), step, ns_between(origin_, begin), ns_between(origin_, end)});
}

void Tracer::collect(int64_t step) {
  std::lock_guard lock(mutex_);
  while (!pending_.empty() && pending_.front().step <= step) {
    Pending& p = pending_.front();
    if (p.ended) keep({p.row, p.label, p.step, ns(p.begin), ns(p.end)});
    free_.push_back(std::move(p.begin));
    free_.push_back(std::move(p.end));
    pending_.pop_front();
  }
}

void Tracer::keep(TraceSpan span) {
  if (spans_.size() < kMaxSpans) {
    spans_.push_back(std::move(span));
  } else {
    ++dropped_;
  }
}

std::vector<TraceSpan> Tracer::take() {
  std::lock_guard lock(mutex_);
  return std::move(spans_);
}

Event Tracer::take_event() {
  if (free_.empty()) return Event::create_timer(device_);
  Event event = std::move(free_.back());
  free_.pop_back();
  return event;
}

SpanOnStream::SpanOnStream(Tracer* tracer, const Stream& stream, TraceLabelPtr label)
    : tracer_(tracer != nullptr && tracer->recording() ? tracer : nullptr), stream_(stream) {
  if (tracer_ == nullptr) return;
  std::lock_guard lock(tracer_->mutex_);
  if (tracer_->spans_.size() + tracer_->pending_.size() >= Tracer::kMaxSpans) {
    ++tracer_->dropped_;
    return;
  }
  // The elements of a deque stay in place while other elements are added and removed at its ends.
  pending_ = &tracer_->pending_.emplace_back(Tracer::Pending{.row = stream.name(),
                                                             .label = std::move(label),
                                                             .step = tracer_->step_,
                                                             .begin = tracer_->take_event(),
                                                             .end = tracer_->take_event()});
  pending_->begin.record(stream);
}

SpanOnStream::~SpanOnStream() {
  if (pending_ == nullptr) return;
  std::lock_guard lock(tracer_->mutex_);
  try {
    pending_->end.record(stream_);
    pending_->ended = true;
  } catch (...) {  // the stream has failed; its next user gets the error
  }
}

void switch_profiler(Device device, bool on) {
  if (!device.is_cuda()) throw DeviceError("a profiler range needs a CUDA device; {} is none", device.name());
  cuda::switch_profiler(device.index, on);
}

}  // namespace gradwire
