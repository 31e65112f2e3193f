// Times work on one device, and measures the copy bandwidth of the same device.
//
// Warm: the same memory each time, so small sizes come from a cache. Cold: caches are overwritten before each
// launch. A host op runs on the calling thread and is timed with the clock, CUDA work with two events.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "runtime/device/device.h"

namespace gradwire::bench {

// Statistics of a row's samples, and the rule that ends a measurement.

// When a measurement ends: with at least `samples` samples, after at least `min_s` seconds, once the standard
// error of the mean is at most `error` of the mean; and in any case after `max_s` seconds, but not before
// kLeastSamples samples.
struct StopRule {
  static constexpr int kLeastSamples = 3;

  double error = 0.005;
  int samples = 10;
  double min_s = 0.5, max_s = 15;
  int exactly = 0;  // if not 0: the number of samples; the other fields are ignored

  // Parses "error=1%,samples=20,min=100ms,max=5s", of which every part may be missing, a number of samples,
  // such as "20", or a time, such as "50ms". Throws BadInput.
  static StopRule parse(const std::string& text);
  std::string to_string() const;
};

// Which part of a rule ended a measurement.
enum class Stopped { error, samples, time };
const char* name(Stopped stopped);

// The statistics of a row, in microseconds.
struct Timing {
  int n = 0;
  double min_us = 0, q1_us = 0, median_us = 0, q3_us = 0;
  double noise = 0;  // standard deviation / mean
  Stopped stopped = Stopped::samples;
  double sm_mhz = 0;      // mean SM clock of a GPU during the measurement; 0: unknown
  std::string throttled;  // reasons of a lower clock, "none", or "" if unknown

  double iqr_us() const { return q3_us - q1_us; }
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
  Stopped stopped_ = Stopped::samples;
};

// Returns the quantile `p`, from 0 to 1, of sorted values, interpolated between neighbors.
double quantile(const std::vector<double>& sorted, double p);
// Returns the smallest value that is at least `percent` percent of the sorted values (nearest rank).
double percentile(const std::vector<double>& sorted, int percent);
// Returns the statistics of a fixed number of samples.
Timing summarize(const std::vector<double>& samples_us);

// The SM clock of a GPU during a measurement, and why it was lowered, from NVML. NVML is part of the driver
// and loaded at run time. Without NVML, and on the host, both are unknown.

class SmClock {
 public:
  explicit SmClock(Device device);
  ~SmClock();
  SmClock(const SmClock&) = delete;

  // Reads the clock, at most every 20 ms: a reading takes much longer than a small kernel.
  void sample();
  // Stores the mean clock since the last call, and the reasons of a lower clock, in `timing`.
  void report(Timing& timing);

 private:
  struct Nvml;
  void read();

  Nvml* nvml_ = nullptr;  // null: unknown
  std::chrono::steady_clock::time_point last_{};
  double sum_mhz_ = 0;
  int readings_ = 0;
  uint64_t reasons_ = 0;
};

// Returns the names of NVML's bits of clock event reasons, such as "power cap, thermal"; "none" for an idle
// GPU or the highest clock.
std::string throttle_text(uint64_t reasons);

using Work = std::function<void(const Stream&)>;

struct TimingWithCopy {
  Timing work;
  double copy_gbps = 0;  // read plus written bytes / median time
};

class DeviceUnderTest {
 public:
  // Prepares measurements on `device`. `stop` ends each measurement.
  DeviceUnderTest(Device device, const StopRule& stop);

  Device device() const { return device_; }
  const Stream& stream() const { return stream_; }
  // Returns "host, 2 threads" or the GPU's name.
  const std::string& description() const { return description_; }
  // Returns the memory in bytes that this process can still allocate.
  int64_t free_bytes() const;
  // Returns the bytes that must be written to evict all cached data. GRADWIRE_BENCH_FLUSH_BYTES overrides it.
  int64_t flush_bytes() const { return flush_bytes_; }

  // Returns the microseconds of one launch; on a GPU, without the time to enqueue the work.
  double time_once_us(const Work& work) const;
  // Times the first work until the stop rule ends its measurement; the others are references. Cold works
  // alternate, so that changes in the machine's speed affect all works alike. Warm works run one after the
  // other, the references for at most a second.
  std::vector<Timing> time(const std::vector<Work>& works, bool cold);
  // The GPU's clock, for measurements that time_once_us() makes.
  SmClock& sm_clock() { return sm_clock_; }

  // Times `work` and copies of a buffer that read and write about `bytes` in total, in one measurement. Host:
  // the fastest copy of bench/harness/measure.cpp; CUDA: cudaMemcpyAsync.
  TimingWithCopy time_with_copy(const Work& work, int64_t bytes, bool cold);
  // Measures only the copies. Returns GB/s.
  double copy_gbps(int64_t bytes, bool cold);
  // Returns GB/s of each way to copy a buffer larger than the caches, e.g. "memcpy 33.0, vector stores 29.5".
  std::string describe_copies();

 private:
  struct CopyWay {
    const char* name;
    Work work;
  };
  // Times works in turns until `stop` ends the measurement of the first.
  std::vector<Timing> time_in_turns(const std::vector<Work>& works, bool cold, const StopRule& stop);
  StopRule reference_rule() const;
  void flush();
  std::vector<CopyWay> copy_ways(int64_t each);

  Device device_;
  StopRule stop_;
  SmClock sm_clock_;
  Stream stream_;
  std::string description_;
  int64_t flush_bytes_ = 0, large_copy_bytes_ = 0;
  Buffer flush_;
  Buffer copy_from_, copy_to_;
};

// Returns the devices for --device auto|host|cuda; auto means all. Throws BadInput.
std::vector<Device> devices_for(const std::string& flag);

}  // namespace gradwire::bench
