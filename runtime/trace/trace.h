// A trace: the activity of a device's streams, from events recorded on them, the same on CUDA and host.
//
// A span is the time between two marks of one stream. Marks that are recorded anyway, to measure times,
// become spans by add() once they are complete, at no cost to the step. Finer marks (SpanOnStream) are
// recorded only in the traced steps. Times are on the clock of this process, relative to the caller's origin;
// where the device has a separate clock, calibrate() relates the two clocks.
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

#include "runtime/device/device.h"

namespace gradwire {

using SteadyTime = std::chrono::steady_clock::time_point;

// A span's name and properties, shared by the spans of many steps.
struct TraceLabel {
  using Value = std::variant<int64_t, std::string>;
  std::string name;
  std::string category;  // determines the color: an Activity's name, or "step", "wait", "exchange", "host"
  std::vector<std::pair<std::string, Value>> details = {};
};
using TraceLabelPtr = std::shared_ptr<const TraceLabel>;

struct TraceSpan {
  std::string row;  // the stream's name
  TraceLabelPtr label;
  int64_t step = 0;
  int64_t begin_ns = 0, end_ns = 0;  // nanoseconds since the trace's origin
};

class Tracer {
 public:
  static constexpr size_t kMaxSpans = 100'000;

  // Creates a tracer. `origin` is time 0 of the trace. Steps [first_step, end_step) are traced.
  Tracer(Device device, SteadyTime origin, int64_t first_step, int64_t end_step);

  // Assigns work enqueued from now on to `step`. If the step is not traced, recording() is false and
  // SpanOnStream does nothing. The same applies if `finer` is false, which graphs need: a graph's launches
  // cannot mark only some steps.
  void begin_step(int64_t step, bool finer = true);
  bool recording() const { return recording_; }
  bool traces(int64_t step) const { return step >= first_step_ && step < end_step_; }
  bool ends_with(int64_t step) const { return step + 1 == end_step_; }

  // Adds a span; both marks must be complete.
  void add(const std::string& row, TraceLabelPtr label, int64_t step, const Event& begin, const Event& end);
  void add(const std::string& row, TraceLabelPtr label, int64_t step, SteadyTime begin, SteadyTime end);
  // Turns the marks of SpanOnStream in `step`, which must be complete, into spans.
  void collect(int64_t step);

  // Returns all spans so far, in any order.
  std::vector<TraceSpan> take();
  // Returns the number of spans that were dropped because there were more than kMaxSpans.
  size_t dropped() const { return dropped_; }
  // Returns the largest error of the device's clock relative to the host's; 0 where both are the same clock.
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
  std::vector<Event> free_;  // events to reuse
  std::vector<TraceSpan> spans_;
  size_t dropped_ = 0;
};

// Marks `stream` now and at the end of the scope, if `tracer` is not null and is recording.
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

// Starts and stops a profiler that waits for a capture range (nsys --capture-range=cudaProfilerApi).

// Starts or stops the recording of the whole process. Work in flight may or may not be recorded, so the
// caller should synchronize first. Throws DeviceError if `device` is the host.
void switch_profiler(Device device, bool on);

}  // namespace gradwire
