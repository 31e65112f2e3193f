// The SM clock of a GPU during a measurement, and why it was lowered, from NVML. NVML is part of the driver
// and loaded at run time. Without NVML, and on the host, both are unknown.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>

#include "bench/harness/timing.h"
#include "runtime/device/device.h"

namespace gradwire::bench {

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

}  // namespace gradwire::bench
