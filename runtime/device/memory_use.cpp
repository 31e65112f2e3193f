#include "runtime/device/memory_use.h"

#include <algorithm>
#include <array>
#include <atomic>

namespace gradwire {
namespace {

struct Count {
  std::atomic<int64_t> bytes{0}, peak{0};
};

Count& count_of(Device device) {
  constexpr size_t kDevices = 64;  // devices with separate counters; further devices share the last counter
  static std::array<Count, 1 + kDevices> counts;
  return counts[device.is_host() ? 0 : 1 + std::min(static_cast<size_t>(device.index), kDevices - 1)];
}

}  // namespace

MemoryUse memory_use(Device device) {
  const Count& count = count_of(device);
  return {count.bytes, count.peak};
}

void reset_memory_peak(Device device) {
  Count& count = count_of(device);
  count.peak = count.bytes.load();
}

void count_memory(Device device, int64_t bytes) {
  Count& count = count_of(device);
  const int64_t now = count.bytes += bytes;
  int64_t peak = count.peak;
  while (now > peak && !count.peak.compare_exchange_weak(peak, now)) {
  }
}

}  // namespace gradwire
