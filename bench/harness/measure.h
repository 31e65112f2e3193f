// Times work on one device, and measures the copy bandwidth of the same device.
//
// Warm: the same memory each time, so small sizes come from a cache. Cold: caches are overwritten before each
// launch. A host op runs on the calling thread and is timed with the clock, CUDA work with two events.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "runtime/device/device.h"

namespace gradwire::bench {

// When a measurement ends: with at least `samples` samples, after at least `min_s` seconds, once the standard
// error of the mean is at most `error` of the mean; and in any case after `max_s` seconds, but not before
// kMinSamples samples.
struct StopRule {
  static constexpr int kMinSamples = 3;

  double error = 0.005;
  int samples = 10;
  double min_s = 0.5, max_s = 15;
  int exactly = 0;  // if not 0: the number of samples; the other fields are ignored

  // Parses "error=1%,samples=20,min=100ms,max=5s", of which every part may be missing, a number of samples,
  // such as "20", or a time, such as "50ms". Throws BadInput.
  static StopRule parse(const std::string& text);
  std::string to_string() const;
};

// The statistics of a row, in microseconds.
struct Timing {
  int n = 0;
  double min_us = 0, q1_us = 0, median_us = 0, q3_us = 0;
  double noise = 0;                 // standard deviation / mean
  const char* stopped = "samples";  // which part of the rule ended the measurement: error, samples or time
  double sm_mhz = 0;                // mean SM clock of a GPU during the measurement; 0: unknown
  std::string throttled = {};       // reasons of a lower clock, "none", or "" if unknown
};

// The samples of one measurement.
class Samples {
 public:
  void add(double us);
  // Returns whether `rule` ends the measurement after `elapsed_s` seconds.
  bool done(const StopRule& rule, double elapsed_s);
  // Returns the statistics. All 0 without samples.
  Timing timing() const;

 private:
  double relative_deviation() const;

  std::vector<double> us_;
  double mean_ = 0, squares_ = 0;  // squares_: sum of the squared differences to the mean
  const char* stopped_ = "samples";
};

// Returns the quantile `p`, from 0 to 1, of sorted values, interpolated between neighbors.
double quantile(const std::vector<double>& sorted, double p);
// Returns the statistics of a fixed number of samples.
Timing summarize(const std::vector<double>& samples_us);

// The SM clock of a GPU during a measurement, and why it was lowered, from NVML. NVML is part of the driver
// and loaded at run time. Without NVML, and on the host, both are unknown.
class SmClock {
 public:
  explicit SmClock(Device device);

  // Reads the clock, at most every 20 ms: a reading takes much longer than a small kernel.
  void sample();
  // Stores the mean clock since the last call, and the reasons of a lower clock, in `timing`.
  void report(Timing& timing);

 private:
  struct Nvml;

  std::shared_ptr<Nvml> nvml_;  // null: unknown
  std::chrono::steady_clock::time_point last_{};
  double sum_mhz_ = 0;
  int readings_ = 0;
  uint64_t reasons_ = 0;
};

using Work = std::function<void(const Stream&)>;

class DeviceUnderTest {
 public:
  // Prepares measurements on `device`. `stop` ends each measurement.
  DeviceUnderTest(Device device, const StopRule& stop);

  // Returns the memory in bytes that this process can still allocate.
  int64_t free_bytes() const;
  // Returns the microseconds of one launch; on a GPU, without the time to enqueue the work.
  double time_once_us(const Work& work) const;
  // Times `work` and copies of a buffer that read and write about `bytes` in total, in one measurement. Host:
  // the fastest copy of bench/harness/measure.cpp; CUDA: cudaMemcpyAsync. Returns the work's statistics, and
  // GB/s of the copies: read plus written bytes / median time. Cold works alternate, so that changes in the
  // machine's speed affect all works alike. Warm works run one after the other, the copies for at most a
  // second.
  std::pair<Timing, double> time_with_copy(const Work& work, int64_t bytes, bool cold);
  // Returns GB/s of each way to copy a buffer larger than the caches, e.g. "memcpy 33.0, vector stores 29.5".
  std::string describe_copies();

  const Device device;
  SmClock sm_clock;
  const Stream stream;
  std::string description;  // "host, 2 threads" or the GPU's name
  // The bytes that must be written to evict all cached data. GRADWIRE_BENCH_FLUSH_BYTES overrides it.
  int64_t flush_bytes = 0;

 private:
  // Times works in turns until `stop` ends the measurement of the first.
  std::vector<Timing> time_in_turns(const std::vector<Work>& works, bool cold, const StopRule& stop);
  std::vector<std::pair<const char*, Work>> copy_ways(int64_t each);

  StopRule stop_, reference_stop_;  // of measurements, and of copies
  int64_t large_copy_bytes_ = 0;
  Buffer flush_, copy_from_, copy_to_;
};

// Returns the devices for --device auto|host|cuda; auto means all. Throws BadInput.
std::vector<Device> devices_for(const std::string& flag);

}  // namespace gradwire::bench
