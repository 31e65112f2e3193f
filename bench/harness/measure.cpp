#include "bench/harness/measure.h"

#ifdef GRADWIRE_HAS_CUDA
#include <cuda_runtime_api.h>
#endif

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <fstream>

#include "bench/harness/copy_loops.h"
#include "runtime/threads/cpus.h"
#include "runtime/threads/thread_pool.h"
#include "runtime/util/environment.h"
#include "runtime/util/error.h"
#include "runtime/util/parse.h"

namespace gradwire::bench {
namespace {

using Clock = std::chrono::steady_clock;

double us_since(Clock::time_point start) {
  return std::chrono::duration<double, std::micro>(Clock::now() - start).count();
}

// Returns the size of the last-level cache according to the kernel; 64 MiB if unknown.
int64_t host_cache_bytes() {
  for (int level : {4, 3, 2}) {
    std::ifstream file(fmt::format("/sys/devices/system/cpu/cpu0/cache/index{}/size", level));
    int64_t kib = 0;
    if (file >> kib && kib > 0) return std::clamp(kib << 10, int64_t{4} << 20, int64_t{256} << 20);
  }
  return int64_t{64} << 20;
}

int64_t available_host_bytes() {
  const int64_t limit = memory_by_limit();
  std::ifstream file("/proc/meminfo");
  for (std::string word; file >> word;) {
    int64_t kib = 0;
    if (word == "MemAvailable:" && file >> kib) return limit > 0 ? std::min(limit, kib << 10) : kib << 10;
  }
  return int64_t{1} << 30;
}

// Returns GRADWIRE_BENCH_FLUSH_BYTES, or 0 if the variable is not set.
int64_t requested_flush_bytes() {
  const char* text = environment("GRADWIRE_BENCH_FLUSH_BYTES");
  if (text == nullptr) return 0;
  if (const auto bytes = parse_number<int64_t>(text, 4096, int64_t{1} << 36)) return *bytes;
  throw BadInput(fmt::format("GRADWIRE_BENCH_FLUSH_BYTES={}: must be a number from 4096 to 2^36", text));
}

#ifdef GRADWIRE_HAS_CUDA
void check(cudaError_t status, const char* call) {
  if (status != cudaSuccess) throw DeviceError(fmt::format("{}: {}", call, cudaGetErrorString(status)));
}
#endif

}  // namespace

DeviceUnderTest::DeviceUnderTest(Device device, const StopRule& stop)
    : device_(device),
      stop_(stop),
      sm_clock_(device),
      stream_(device.is_host() ? Stream::immediate_host() : Stream::create(device, "bench")) {
  if (device.is_host()) {
    int threads = host_threads();
    description_ = fmt::format("host, {} {}", threads, threads == 1 ? "thread" : "threads");
    flush_bytes_ = 2 * host_cache_bytes();
  } else {
#ifdef GRADWIRE_HAS_CUDA
    cudaDeviceProp properties{};
    check(cudaGetDeviceProperties(&properties, device.index), "cudaGetDeviceProperties");
    description_ = fmt::format("{}, {}", device.name(), properties.name);
    flush_bytes_ = std::max<int64_t>(int64_t{2} * properties.l2CacheSize, int64_t{64} << 20);
#endif
  }
  large_copy_bytes_ = std::max<int64_t>(int64_t{256} << 20, flush_bytes_);
  if (const int64_t bytes = requested_flush_bytes()) flush_bytes_ = large_copy_bytes_ = bytes;
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
  if (flush_.bytes() == 0) {
    flush_ = Buffer(device_, static_cast<size_t>(flush_bytes_));
    fill_zero(stream_, flush_.data(), flush_.bytes());  // touches all pages
    stream_.synchronize();
  }
  fill_zero(stream_, flush_.data(), flush_.bytes());
}

double DeviceUnderTest::time_once_us(const Work& work) const {
  if (device_.is_host()) {
    auto start = Clock::now();
    work(stream_);
    return us_since(start);
  }
  Event begin = Event::create_timer(device_), end = Event::create_timer(device_);
  begin.record(stream_);
  work(stream_);
  end.record(stream_);
  end.synchronize();
  return elapsed_ms(begin, end) * 1e3;
}

std::vector<Timing> DeviceUnderTest::time_in_turns(const std::vector<Work>& works, bool cold,
                                                   const StopRule& stop) {
  // Minimum time of a sample. Short work is repeated within a sample, so that the resolution of clock and
  // events has little effect.
  constexpr double kLongEnoughUs = 100;
  std::vector<int> inner(works.size(), 1);
  std::vector<Samples> samples(works.size());
  for (size_t i = 0; i < works.size(); ++i) {
    works[i](stream_);
    stream_.synchronize();
    if (cold) continue;
    const double us = std::max(time_once_us(works[i]), 0.1);
    inner[i] = static_cast<int>(std::clamp(kLongEnoughUs / us, 1.0, 1000.0));
  }
  const auto start = Clock::now();
  do {
    for (size_t i = 0; i < works.size(); ++i) {
      if (cold) flush();
      const double us = time_once_us([&](const Stream& s) {
        for (int k = 0; k < inner[i]; ++k) works[i](s);
      });
      samples[i].add(us / inner[i]);
      sm_clock_.sample();
    }
  } while (!samples[0].done(stop, us_since(start) / 1e6 / static_cast<double>(works.size())));
  std::vector<Timing> timings;
  for (const Samples& s : samples) timings.push_back(s.timing());
  sm_clock_.report(timings[0]);
  return timings;
}

std::vector<Timing> DeviceUnderTest::time(const std::vector<Work>& works, bool cold) {
  if (cold) return time_in_turns(works, true, stop_);
  std::vector<Timing> timings;
  for (const Work& work : works) {  // alternating works would evict each other from the caches
    timings.push_back(time_in_turns({work}, false, timings.empty() ? stop_ : reference_rule()).front());
  }
  return timings;
}

StopRule DeviceUnderTest::reference_rule() const {
  StopRule rule = stop_;
  rule.error = std::max(rule.error, 0.01);
  rule.min_s = std::min(rule.min_s, 0.1);
  rule.max_s = std::min(rule.max_s, 1.0);
  return rule;
}

std::vector<DeviceUnderTest::CopyWay> DeviceUnderTest::copy_ways(int64_t each) {
  if (static_cast<int64_t>(copy_to_.bytes()) < each) {
    for (Buffer* buffer : {&copy_from_, &copy_to_}) {
      *buffer = Buffer(device_, static_cast<size_t>(each));
      fill_zero(stream_, buffer->data(), buffer->bytes());
    }
  }
  void *from = copy_from_.data(), *to = copy_to_.data();
  std::vector<CopyWay> ways;
  if (device_.is_host()) {
    for (CopyLoop loop : copy_loops()) {
      ways.push_back({loop.name, [=](const Stream&) { copy_in_parallel(loop, to, from, each); }});
    }
  } else {
    ways.push_back(
        {"cudaMemcpyAsync", [=](const Stream& s) { copy(s, to, from, static_cast<size_t>(each)); }});
  }
  return ways;
}

TimingWithCopy DeviceUnderTest::time_with_copy(const Work& work, int64_t bytes, bool cold) {
  // Clamp the size of the copies. The bandwidth is constant for sizes above the caches. Clock resolution
  // dominates for sizes below a page.
  const int64_t each = std::clamp<int64_t>(bytes / 2 / 64 * 64, 4096, large_copy_bytes_);
  std::vector<Work> works = {work};
  for (CopyWay& way : copy_ways(each)) works.push_back(std::move(way.work));
  std::vector<Timing> timings = time(works, cold);
  TimingWithCopy result{timings[0], 0};
  for (size_t i = 1; i < timings.size(); ++i) {
    result.copy_gbps =
        std::max(result.copy_gbps, 2.0 * static_cast<double>(each) / timings[i].median_us / 1e3);
  }
  return result;
}

double DeviceUnderTest::copy_gbps(int64_t bytes, bool cold) {
  return time_with_copy([](const Stream&) {}, bytes, cold).copy_gbps;
}

std::string DeviceUnderTest::describe_copies() {
  std::vector<CopyWay> ways = copy_ways(large_copy_bytes_);
  std::vector<Work> works;
  for (const CopyWay& way : ways) works.push_back(way.work);
  std::vector<Timing> timings = time_in_turns(works, true, reference_rule());
  std::string text;
  for (size_t i = 0; i < ways.size(); ++i) {
    double gbps = 2.0 * static_cast<double>(large_copy_bytes_) / timings[i].median_us / 1e3;
    text += fmt::format("{}{} {:.1f}", i == 0 ? "" : ", ", ways[i].name, gbps);
  }
  return text;
}

std::vector<Device> devices_for(const std::string& flag) {
  if (flag == "host") return {Device::host()};
  if (flag == "auto") return available_devices();
  if (cuda_device_count() == 0) {
    throw BadInput(fmt::format("--device cuda: {}; use --device host", cuda_unavailable_reason()));
  }
  return {Device::cuda(0)};
}

}  // namespace gradwire::bench
