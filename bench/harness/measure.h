// Times work on one device, and measures the same device's copy bandwidth.
//
// Warm: the same memory again and again, so small sizes come from a cache. Cold: caches are overwritten
// before each launch. A host op runs on the calling thread and is timed with the clock, CUDA work with two
// events.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "runtime/device.h"

namespace gradwire::bench {

struct Timing {
  double median_us = 0, min_us = 0;
  int repeats = 0;
};

Timing summarize(std::vector<double> samples_us);

using Work = std::function<void(const Stream&)>;

struct BesideCopy {
  Timing work;
  double copy_gbps = 0;  // from the median time; read plus written bytes
};

class DeviceUnderTest {
 public:
  // Measurements take about `budget_ms` each.
  DeviceUnderTest(Device device, double budget_ms);

  Device device() const { return device_; }
  const Stream& stream() const { return stream_; }
  // "host, 2 threads" or the GPU's name.
  const std::string& description() const { return description_; }
  // Bytes that this process can still allocate.
  int64_t free_bytes() const;
  // A pass over this many bytes evicts everything from the caches. GRADWIRE_BENCH_FLUSH_BYTES changes it.
  int64_t flush_bytes() const { return flush_bytes_; }

  // One launch; on a GPU without the time to enqueue it.
  double time_once_us(const Work& work) const;
  // Repeats each as long as the budget lasts, between 3 and 50 times: cold work in turns, so that changes in
  // the machine's speed affect all alike; warm work one after the other.
  std::vector<Timing> time(const std::vector<Work>& works, bool cold);

  // Times `work` and, alongside, copies of a buffer that read and write about `bytes` in total. Host: the
  // fastest of bench/harness/copy_loops.h; CUDA: cudaMemcpyAsync.
  BesideCopy time_beside_copy(const Work& work, int64_t bytes, bool cold);
  // The copies alone.
  double copy_gbps(int64_t bytes, bool cold);
  // GB/s of each way of copying a buffer that fits no cache, e.g. "memcpy 33.0, vector stores 29.5".
  std::string describe_copies();

 private:
  struct CopyWay {
    const char* name;
    Work work;
  };
  void flush();
  std::vector<CopyWay> copy_ways(int64_t each);

  Device device_;
  double budget_ms_;
  Stream stream_;
  std::string description_;
  int64_t flush_bytes_ = 0, large_copy_bytes_ = 0;
  Buffer flush_;
  Buffer copy_from_, copy_to_;
};

// The devices selected by --device auto|host|cuda; auto means all. Throws BadInput.
std::vector<Device> devices_for(const std::string& flag);

}  // namespace gradwire::bench
