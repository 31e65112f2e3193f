// Times work on one device, and measures the copy bandwidth of the same device.
//
// Warm: the same memory each time, so small sizes come from a cache. Cold: caches are overwritten before each
// launch. A host op runs on the calling thread and is timed with the clock, CUDA work with two events.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "bench/harness/sm_clock.h"
#include "bench/harness/timing.h"
#include "runtime/device/device.h"

namespace gradwire::bench {

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
  // the fastest copy of bench/harness/copy_loops.h; CUDA: cudaMemcpyAsync.
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
