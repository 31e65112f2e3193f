// A trace: what the streams of a device did, from events recorded on them, on CUDA and host alike.
//
// A span is the time between two marks of one stream. Marks that are recorded anyway, to measure times,
// become spans by add() once they are done, at no cost to the step. Finer ones (SpanOnStream) are recorded
// for the trace only, in the traced steps. Times are on the clock of this process, counted from an origin
// that the caller gives; where the device has a clock of its own, calibrate() relates the two.
#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "runtime/device.h"

namespace gradwire {

using SteadyTime = std::chrono::steady_clock::time_point;

// A span's name and properties; the spans of many steps share one.
struct TraceLabel {
  using Value = std::variant<int64_t, std::string>;
  std::string name;
  std::string category;  // what colors it: an Activity's name, or "step", "wait", "exchange", "host"
  std::vector<std::pair<std::string, Value>> details = {};
};
using TraceLabelPtr = std::shared_ptr<const TraceLabel>;

struct TraceSpan {
  std::string row;  // the stream's name
  TraceLabelPtr label;
  int64_t step = 0;
  int64_t begin_ns = 0, end_ns = 0;  // from the trace's origin
};

class Tracer {
 public:
  static constexpr size_t kMostSpans = 100'000;

  // `origin` is the trace's time 0. Steps [first_step, end_step) are traced.
  Tracer(Device device, SteadyTime origin, int64_t first_step, int64_t end_step);

  // Work enqueued from now on belongs to `step`. If that is not traced, recording() is false and SpanOnStream
  // does nothing. The same if `finer` is off: a graph's launches cannot mark some steps only.
  void begin_step(int64_t step, bool finer = true);
  bool recording() const { return recording_; }
  bool traces(int64_t step) const { return step >= first_step_ && step < end_step_; }
  bool ends_with(int64_t step) const { return step + 1 == end_step_; }

  // Both marks are done.
  void add(const std::string& row, TraceLabelPtr label, int64_t step, const Event& begin, const Event& end);
  void add(const std::string& row, TraceLabelPtr label, int64_t step, SteadyTime begin, SteadyTime end);
  // Turns what SpanOnStream recorded in `step`, which must be done, into spans.
  void collect(int64_t step);

  // All spans so far, in no order.
  std::vector<TraceSpan> take();
  // The number of spans dropped beyond kMostSpans.
  size_t dropped() const { return dropped_; }
  // How far the device's clock may be off the host's; 0 where they are the same.
  double error_us() const { return static_cast<double>(error_ns_) / 1e3; }

 private:
  friend class SpanOnStream;
  struct Pending {
    std::string row;
    TraceLabelPtr label;
    int64_t step;
    Event begin, end;
    bool ended = false;
  };

  void calibrate();
  int64_t ns(const Event& event) const;
  void keep(TraceSpan span);
  Event take_event();

  const Device device_;
  const SteadyTime origin_;
  const int64_t first_step_, end_step_;
  bool recording_ = false;
  int64_t step_ = 0;
  Event reference_;
  int64_t reference_ns_ = 0, error_ns_ = 0;
  std::mutex mutex_;  // spans may begin and end in several threads
  std::deque<Pending> pending_;
  std::vector<Event> free_;  // events are used again
  std::vector<TraceSpan> spans_;
  size_t dropped_ = 0;
};

// Marks `stream` now and at the end of the scope, if there is a `tracer` and it is recording.
class SpanOnStream {
 public:
  SpanOnStream(Tracer* tracer, const Stream& stream, TraceLabelPtr label);
  ~SpanOnStream();
  SpanOnStream(const SpanOnStream&) = delete;

 private:
  Tracer* tracer_;
  const Stream stream_;
  Tracer::Pending* pending_ = nullptr;
};

}  // namespace gradwire
