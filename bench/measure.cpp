#include "bench/measure.h"

#ifdef GRADWIRE_HAS_CUDA
#include <cuda_runtime_api.h>
#endif

#include <algorithm>
#include <bit>
#include <chrono>
#include <cstring>
#include <fstream>

#include "bench/copy_loops.h"
#include "bench/text.h"
#include "kernels/error.h"
#include "kernels/thread_pool.h"

namespace gradwire::bench {
namespace {

using Clock = std::chrono::steady_clock;

double us_since(Clock::time_point start) {
  return std::chrono::duration<double, std::micro>(Clock::now() - start).count();
}

// The last level of cache that a core can reach, as the kernel tells it; 64 MiB when it does not.
int64_t host_cache_bytes() {
  for (int level : {4, 3, 2}) {
    std::ifstream file("/sys/devices/system/cpu/cpu0/cache/index" + std::to_string(level) + "/size");
    int64_t kib = 0;
    if (file >> kib && kib > 0) return std::clamp(kib << 10, int64_t{4} << 20, int64_t{256} << 20);
  }
  return int64_t{64} << 20;
}

int64_t available_host_bytes() {
  std::ifstream file("/proc/meminfo");
  for (std::string word; file >> word;) {
    int64_t kib = 0;
    if (word == "MemAvailable:" && file >> kib) return kib << 10;
  }
  return int64_t{1} << 30;
}

#ifdef GRADWIRE_HAS_CUDA
void check(cudaError_t status, const char* call) {
  if (status != cudaSuccess) throw DeviceError(std::string(call) + ": " + cudaGetErrorString(status));
}
#endif

}  // namespace

Timing summarize(std::vector<double> samples_us) {
  if (samples_us.empty()) return {};
  std::sort(samples_us.begin(), samples_us.end());
  size_t n = samples_us.size();
  return {(samples_us[(n - 1) / 2] + samples_us[n / 2]) / 2, samples_us[0], static_cast<int>(n)};
}

DeviceUnderTest::DeviceUnderTest(Device device, double budget_ms)
    : device_(device),
      budget_ms_(budget_ms),
      stream_(device.is_host() ? Stream::immediate_host() : Stream::create(device, "bench")) {
  if (device.is_host()) {
    int threads = host_threads();
    description_ = "host, " + std::to_string(threads) + (threads == 1 ? " thread" : " threads");
    flush_bytes_ = 2 * host_cache_bytes();
  } else {
#ifdef GRADWIRE_HAS_CUDA
    cudaDeviceProp properties{};
    check(cudaGetDeviceProperties(&properties, device.index), "cudaGetDeviceProperties");
    description_ = device.name() + ", " + properties.name;
    flush_bytes_ = std::max<int64_t>(int64_t{2} * properties.l2CacheSize, int64_t{64} << 20);
#endif
  }
  flush_ = Buffer(device, static_cast<size_t>(flush_bytes_));
  flush();
  stream_.synchronize();
}

int64_t DeviceUnderTest::free_bytes() const {
  if (device_.is_host()) return available_host_bytes();
#ifdef GRADWIRE_HAS_CUDA
  size_t free = 0, total = 0;
  check(cudaSetDevice(device_.index), "cudaSetDevice");
  check(cudaMemGetInfo(&free, &total), "cudaMemGetInfo");
  return static_cast<int64_t>(free);
#else
  return 0;
#endif
}

void DeviceUnderTest::flush() {
  fill_zero(stream_, flush_.data(), flush_.bytes());
}

double DeviceUnderTest::time_once_us(const Work& work) const {
  if (device_.is_host()) {
    auto start = Clock::now();
    work(stream_);
    return us_since(start);
  }
  Event begin = Event::create(device_), end = Event::create(device_);
  begin.record(stream_);
  work(stream_);
  end.record(stream_);
  end.synchronize();
  return elapsed_ms(begin, end) * 1e3;
}

Timing DeviceUnderTest::time(const Work& work, bool cold) {
  constexpr int kLeast = 3, kMost = 50;
  // Short work is repeated inside one measurement, so that clock and event resolution do not matter.
  constexpr double kLongEnoughUs = 100;
  work(stream_);
  stream_.synchronize();
  int inner = 1;
  if (!cold) {
    double us = std::max(time_once_us(work), 0.1);
    inner = static_cast<int>(std::clamp(kLongEnoughUs / us, 1.0, 1000.0));
  }
  std::vector<double> samples;
  auto start = Clock::now();
  while (static_cast<int>(samples.size()) < kLeast ||
         (us_since(start) < budget_ms_ * 1e3 && static_cast<int>(samples.size()) < kMost)) {
    if (cold) flush();
    samples.push_back(time_once_us([&](const Stream& s) {
                        for (int i = 0; i < inner; ++i) work(s);
                      }) /
                      inner);
  }
  return summarize(std::move(samples));
}

std::vector<DeviceUnderTest::CopyWay> DeviceUnderTest::measure_copies(int64_t each, bool cold) {
  if (static_cast<int64_t>(copy_to_.bytes()) < each) {
    for (Buffer* buffer : {&copy_from_, &copy_to_}) {
      *buffer = Buffer(device_, static_cast<size_t>(each));
      fill_zero(stream_, buffer->data(), buffer->bytes());
    }
  }
  void *from = copy_from_.data(), *to = copy_to_.data();
  std::vector<std::pair<const char*, Work>> ways;
  if (device_.is_host()) {
    for (CopyLoop loop : copy_loops()) {
      ways.emplace_back(loop.name, [=](const Stream&) { copy_in_parallel(loop, to, from, each); });
    }
  } else {
    ways.emplace_back("cudaMemcpyAsync",
                      [=](const Stream& s) { copy(s, to, from, static_cast<size_t>(each)); });
  }
  std::vector<CopyWay> measured;
  for (const auto& [name, work] : ways) {
    measured.push_back({name, 2.0 * static_cast<double>(each) / time(work, cold).min_us / 1e3});
  }
  return measured;
}

double DeviceUnderTest::copy_gbps(int64_t bytes, bool cold) {
  // Beyond the caches nothing changes any more; below a page the clock rules.
  int64_t each = std::clamp<int64_t>(static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(bytes))) / 2,
                                     4096, large_copy_bytes());
  double best = 0;
  for (const CopyWay& way : measure_copies(each, cold)) best = std::max(best, way.gbps);
  return best;
}

std::string DeviceUnderTest::describe_copies() {
  std::string text;
  for (const CopyWay& way : measure_copies(large_copy_bytes(), true)) {
    text += (text.empty() ? "" : ", ") + std::string(way.name) + " " + number(way.gbps, 1);
  }
  return text;
}

std::vector<Device> devices_for(const std::string& flag) {
  if (flag == "host") return {Device::host()};
  if (flag == "auto") return available_devices();
  if (flag != "cuda") throw BadInput("--device '" + flag + "': use auto, host or cuda");
  if (cuda_device_count() == 0) {
    throw BadInput("--device cuda: " + cuda_unavailable_reason() + "; use --device host");
  }
  return {Device::cuda(0)};
}

}  // namespace gradwire::bench
