#include "bench/harness/measure.h"

#include <dlfcn.h>
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <optional>
#include <vector>

#include "kernels/simd/vector.h"
#include "runtime/threads/thread.h"
#include "runtime/threads/thread_pool.h"
#include "runtime/util/environment.h"
#include "runtime/util/error.h"
#include "runtime/util/parse.h"

#ifdef GRADWIRE_HAS_CUDA
#include <cuda_runtime_api.h>
#endif

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace gradwire::bench {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kMaxSamples = 1'000'000;
constexpr double kMaxSeconds = 86400;

double us_since(Clock::time_point start) {
  return std::chrono::duration<double, std::micro>(Clock::now() - start).count();
}

#ifdef GRADWIRE_HAS_CUDA
void check(cudaError_t status, const char* call) {
  if (status != cudaSuccess) throw DeviceError("{}: {}", call, cudaGetErrorString(status));
}
#endif

// Plain memory copies on the host, as the reference for the speed of kernels: between 64-byte aligned
// addresses, `bytes` a multiple of 64. An ordinary store first reads its cache line, so a copy reaches at
// most two thirds of the bandwidth.
using CopyLoop = void (*)(void* to, const void* from, int64_t bytes);

GW_SIMD void with_vectors(void* to, const void* from, int64_t bytes) {
  auto* out = static_cast<float*>(to);
  auto* in = static_cast<const float*>(from);
  // The compiler turns a plain loop into a call of memcpy, but does not replace a loop over vectors.
  using Vector [[gnu::vector_size(64), gnu::may_alias]] = float;
  for (int64_t i = 0; i < bytes / 4; i += 16) {
    *reinterpret_cast<Vector*>(out + i) = *reinterpret_cast<const Vector*>(in + i);
  }
}

#if defined(__x86_64__)
__attribute__((target("avx"))) void non_temporal(void* to, const void* from, int64_t bytes) {
  auto* out = static_cast<float*>(to);
  auto* in = static_cast<const float*>(from);
  for (int64_t i = 0; i < bytes / 4; i += 16) {
    _mm256_stream_ps(out + i, _mm256_load_ps(in + i));
    _mm256_stream_ps(out + i + 8, _mm256_load_ps(in + i + 8));
  }
  _mm_sfence();
}
#endif

}  // namespace

DeviceUnderTest::DeviceUnderTest(Device device_, const StopRule& stop)
    : device(device_),
      sm_clock(device),
      stream(device.is_host() ? Stream::immediate_host() : Stream::create(device, "bench")),
      stop_(stop),
      reference_stop_(stop) {
  reference_stop_.error = std::max(stop.error, 0.01);
  reference_stop_.min_s = std::min(stop.min_s, 0.1);
  reference_stop_.max_s = std::min(stop.max_s, 1.0);
  if (device.is_host()) {
    const int threads = host_threads();
    description = fmt::format("host, {} {}", threads, threads == 1 ? "thread" : "threads");
    // Twice the last-level cache according to the kernel; 128 MiB if unknown.
    flush_bytes = int64_t{128} << 20;
    for (int level : {2, 3, 4}) {
      std::ifstream file(fmt::format("/sys/devices/system/cpu/cpu0/cache/index{}/size", level));
      int64_t kib = 0;
      if (file >> kib && kib > 0)
        flush_bytes = 2 * std::clamp(kib << 10, int64_t{4} << 20, int64_t{256} << 20);
    }
  } else {
#ifdef GRADWIRE_HAS_CUDA
    cudaDeviceProp properties{};
    check(cudaGetDeviceProperties(&properties, device.index), "cudaGetDeviceProperties");
    description = fmt::format("{}, {}", device.name(), properties.name);
    flush_bytes = std::max<int64_t>(int64_t{2} * properties.l2CacheSize, int64_t{64} << 20);
#endif
  }
  large_copy_bytes_ = std::max<int64_t>(int64_t{256} << 20, flush_bytes);
  if (const char* text = environment("GRADWIRE_BENCH_FLUSH_BYTES")) {
    const auto bytes = parse_number<int64_t>(text, 4096, int64_t{1} << 36);
    if (!bytes) throw BadInput("GRADWIRE_BENCH_FLUSH_BYTES={}: must be a number from 4096 to 2^36", text);
    flush_bytes = large_copy_bytes_ = *bytes;
  }
}

int64_t DeviceUnderTest::free_bytes() const {
#ifdef GRADWIRE_HAS_CUDA
  if (device.is_cuda()) {
    size_t free = 0, total = 0;
    check(cudaSetDevice(device.index), "cudaSetDevice");
    check(cudaMemGetInfo(&free, &total), "cudaMemGetInfo");
    return static_cast<int64_t>(free);
  }
#endif
  const int64_t limit = memory_by_limit();
  std::ifstream file("/proc/meminfo");
  for (std::string word; file >> word;) {
    int64_t kib = 0;
    if (word == "MemAvailable:" && file >> kib) return limit > 0 ? std::min(limit, kib << 10) : kib << 10;
  }
  return int64_t{1} << 30;
}

double DeviceUnderTest::time_once_us(const Work& work) const {
  if (device.is_host()) {
    auto start = Clock::now();
    work(stream);
    return us_since(start);
  }
  Event begin = Event::create_timer(device), end = Event::create_timer(device);
  begin.record(stream);
  work(stream);
  end.record(stream);
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
    works[i](stream);
    stream.synchronize();
    if (cold) continue;
    const double us = std::max(time_once_us(works[i]), 0.1);
    inner[i] = static_cast<int>(std::clamp(kLongEnoughUs / us, 1.0, 1000.0));
  }
  if (cold && flush_.bytes() == 0) {
    flush_ = Buffer(device, static_cast<size_t>(flush_bytes));
    fill_zero(stream, flush_.data(), flush_.bytes());  // touches all pages
    stream.synchronize();
  }
  const auto start = Clock::now();
  do {
    for (size_t i = 0; i < works.size(); ++i) {
      if (cold) fill_zero(stream, flush_.data(), flush_.bytes());
      const double us = time_once_us([&](const Stream& s) {
        for (int k = 0; k < inner[i]; ++k) works[i](s);
      });
      samples[i].add(us / inner[i]);
      sm_clock.sample();
    }
  } while (!samples[0].done(stop, us_since(start) / 1e6 / static_cast<double>(works.size())));
  std::vector<Timing> timings;
  for (const Samples& s : samples) timings.push_back(s.timing());
  sm_clock.report(timings[0]);
  return timings;
}

std::vector<std::pair<const char*, Work>> DeviceUnderTest::copy_ways(int64_t each) {
  if (static_cast<int64_t>(copy_to_.bytes()) < each) {
    for (Buffer* buffer : {&copy_from_, &copy_to_}) {
      *buffer = Buffer(device, static_cast<size_t>(each));
      fill_zero(stream, buffer->data(), buffer->bytes());
    }
  }
  void *from = copy_from_.data(), *to = copy_to_.data();
  if (device.is_cuda())
    return {{"cudaMemcpyAsync", [=](const Stream& s) { copy(s, to, from, static_cast<size_t>(each)); }}};
  std::vector<std::pair<const char*, Work>> ways;
  auto add = [&](const char* name, CopyLoop loop) {
    ways.emplace_back(name, [=](const Stream&) {
      const int64_t grain = std::clamp<int64_t>(each / host_threads() / 64 * 64, 64 << 10, 1 << 20);
      parallel_for(each / 64 * 64, grain, [=](int64_t begin, int64_t end) {
        loop(static_cast<char*>(to) + begin, static_cast<const char*>(from) + begin, end - begin);
      });
    });
  };
  add("memcpy", [](void* out, const void* in, int64_t n) { std::memcpy(out, in, static_cast<size_t>(n)); });
  add("vector stores", with_vectors);
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx")) add("non-temporal stores", non_temporal);
#endif
  return ways;
}

std::pair<Timing, double> DeviceUnderTest::time_with_copy(const Work& work, int64_t bytes, bool cold) {
  // Clamp the size of the copies. The bandwidth is constant for sizes above the caches. Clock resolution
  // dominates for sizes below a page.
  const int64_t each = std::clamp<int64_t>(bytes / 2 / 64 * 64, 4096, large_copy_bytes_);
  std::vector<Work> works = {work};
  for (auto& [name, copy] : copy_ways(each)) works.push_back(std::move(copy));
  std::vector<Timing> timings;
  if (cold) {
    timings = time_in_turns(works, true, stop_);
  } else {
    for (const Work& each_work : works) {  // alternating works would evict each other from the caches
      const StopRule& rule = timings.empty() ? stop_ : reference_stop_;
      timings.push_back(time_in_turns({each_work}, false, rule).front());
    }
  }
  double gbps = 0;
  for (size_t i = 1; i < timings.size(); ++i)
    gbps = std::max(gbps, 2.0 * static_cast<double>(each) / timings[i].median_us / 1e3);
  return {timings[0], gbps};
}

std::string DeviceUnderTest::describe_copies() {
  const auto ways = copy_ways(large_copy_bytes_);
  std::vector<Work> works;
  for (const auto& [name, work] : ways) works.push_back(work);
  std::vector<Timing> timings = time_in_turns(works, true, reference_stop_);
  std::string text;
  for (size_t i = 0; i < ways.size(); ++i) {
    const double gbps = 2.0 * static_cast<double>(large_copy_bytes_) / timings[i].median_us / 1e3;
    text += fmt::format("{}{} {:.1f}", i == 0 ? "" : ", ", ways[i].first, gbps);
  }
  return text;
}

std::vector<Device> devices_for(const std::string& flag) {
  if (flag == "host") return {Device::host()};
  if (flag == "auto") return available_devices();
  if (cuda_device_count() == 0) {
    throw BadInput("--device cuda: {}; use --device host", cuda_unavailable_reason());
  }
  return {Device::cuda(0)};
}

namespace {

std::optional<double> seconds(std::string_view text) {
  for (const auto& [unit, per_s] : {std::pair("us", 1e6), std::pair("ms", 1e3), std::pair("s", 1.0)}) {
    if (!text.ends_with(unit)) continue;
    const std::string_view number = text.substr(0, text.size() - std::string_view(unit).size());
    if (const auto value = parse_number<double>(number, 0, kMaxSeconds * per_s)) return *value / per_s;
  }
  return {};
}

}  // namespace

StopRule StopRule::parse(const std::string& text) {
  auto refuse = [&](const std::string& why) {
    throw BadInput(
        "--stop {}: {}; expected parts of error=0.5%,samples=10,min=0.5s,max=15s, a number of "
        "samples such as 20, or a time such as 50ms",
        text, why);
  };
  StopRule rule;
  if (const auto count = parse_number<int>(text, 1, kMaxSamples)) {
    rule.exactly = *count;
    return rule;
  }
  if (const auto time = seconds(text)) {
    rule.error = 0;
    rule.samples = kMinSamples;
    rule.min_s = rule.max_s = *time;
    return rule;
  }
  bool has_min = false;
  const std::string_view all = text;
  for (size_t begin = 0, comma = 0; comma != std::string_view::npos; begin = comma + 1) {
    comma = all.find(',', begin);
    const std::string_view part = all.substr(begin, comma - begin);
    const size_t equals = part.find('=');
    const std::string_view key = part.substr(0, equals);
    const std::string_view value =
        equals == std::string_view::npos ? std::string_view() : part.substr(equals + 1);
    const auto percent =
        value.ends_with('%') ? parse_number<double>(value.substr(0, value.size() - 1), 0, 100) : std::nullopt;
    if (key == "error" && percent) {
      rule.error = *percent / 100;
    } else if (const auto count = parse_number<int>(value, kMinSamples, kMaxSamples);
               key == "samples" && count) {
      rule.samples = *count;
    } else if (const auto time = seconds(value); (key == "min" || key == "max") && time) {
      (key == "min" ? rule.min_s : rule.max_s) = *time;
      has_min = has_min || key == "min";
    } else {
      refuse(fmt::format("'{}' is not a part of a rule", part));
    }
  }
  if (!has_min) rule.min_s = std::min(rule.min_s, rule.max_s);
  if (rule.min_s > rule.max_s) refuse("min is more than max");
  return rule;
}

std::string StopRule::to_string() const {
  auto time_text = [](double s) {
    return s < 1 && s > 0 ? fmt::format("{:g}ms", s * 1e3) : fmt::format("{:g}s", s);
  };
  if (exactly > 0) return fmt::to_string(exactly);
  if (error == 0 && samples == kMinSamples && min_s == max_s) return time_text(max_s);
  return fmt::format("error={:g}%,samples={},min={},max={}", error * 100, samples, time_text(min_s),
                     time_text(max_s));
}

void Samples::add(double us) {
  us_.push_back(us);
  const double difference = us - mean_;
  mean_ += difference / static_cast<double>(us_.size());
  squares_ += difference * (us - mean_);
}

double Samples::relative_deviation() const {
  if (us_.size() < 2 || mean_ <= 0) return 0;
  return std::sqrt(squares_ / static_cast<double>(us_.size() - 1)) / mean_;
}

bool Samples::done(const StopRule& rule, double elapsed_s) {
  const auto n = static_cast<int>(us_.size());
  if (rule.exactly > 0) return n >= rule.exactly;
  if (n < StopRule::kMinSamples) return false;
  if (elapsed_s >= rule.max_s || n >= kMaxSamples) {
    stopped_ = "time";
    return true;
  }
  if (n < rule.samples || elapsed_s < rule.min_s) return false;
  if (relative_deviation() > rule.error * std::sqrt(n)) return false;
  stopped_ = "error";
  return true;
}

Timing Samples::timing() const {
  if (us_.empty()) return {};
  std::vector<double> sorted = us_;
  std::sort(sorted.begin(), sorted.end());
  Timing timing;
  timing.n = static_cast<int>(sorted.size());
  timing.min_us = sorted[0];
  timing.q1_us = quantile(sorted, 0.25);
  timing.median_us = quantile(sorted, 0.5);
  timing.q3_us = quantile(sorted, 0.75);
  timing.noise = relative_deviation();
  timing.stopped = stopped_;
  return timing;
}

double quantile(const std::vector<double>& sorted, double p) {
  const double at = p * static_cast<double>(sorted.size() - 1);
  const auto below = static_cast<size_t>(at);
  const size_t above = std::min(below + 1, sorted.size() - 1);
  return sorted[below] + (at - static_cast<double>(below)) * (sorted[above] - sorted[below]);
}

Timing summarize(const std::vector<double>& samples_us) {
  Samples samples;
  for (double us : samples_us) samples.add(us);
  return samples.timing();
}

// The functions of libnvidia-ml.so.1. Their signatures are stable; 0 is success.
struct SmClock::Nvml {
  void* library = dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL);
  void* device = nullptr;
  int (*shutdown)() = nullptr;
  int (*clock)(void*, int, unsigned*) = nullptr;
  int (*reasons)(void*, unsigned long long*) = nullptr;

  template <typename Function>
  bool find(Function& function, const char* name) {
    function = reinterpret_cast<Function>(dlsym(library, name));
    return function != nullptr;
  }

  // Returns whether NVML knows the GPU. CUDA and NVML number GPUs differently, so the bus address selects it.
  bool open([[maybe_unused]] int index) {
#ifdef GRADWIRE_HAS_CUDA
    int (*init)() = nullptr;
    int (*by_bus)(const char*, void**) = nullptr;
    char bus[32] = {};
    if (library == nullptr || !find(init, "nvmlInit_v2") ||
        !find(by_bus, "nvmlDeviceGetHandleByPciBusId_v2") || !find(clock, "nvmlDeviceGetClockInfo") ||
        !find(reasons, "nvmlDeviceGetCurrentClocksThrottleReasons") || init() != 0) {
      return false;
    }
    find(shutdown, "nvmlShutdown");
    if (cudaDeviceGetPCIBusId(bus, sizeof bus, index) == cudaSuccess) return by_bus(bus, &device) == 0;
    cudaGetLastError();  // clear the sticky error
#endif
    return false;
  }
  ~Nvml() {
    if (shutdown != nullptr) shutdown();
    if (library != nullptr) dlclose(library);
  }
};

SmClock::SmClock(Device device) {
  if (!device.is_cuda()) return;
  nvml_ = std::make_shared<Nvml>();
  if (!nvml_->open(device.index)) nvml_.reset();
}

void SmClock::sample() {
  constexpr std::chrono::milliseconds kApart{20};
  constexpr int kSm = 1;  // NVML_CLOCK_SM
  if (nvml_ == nullptr) return;
  const auto now = Clock::now();
  if (readings_ > 0 && now - last_ < kApart) return;
  last_ = now;
  unsigned mhz = 0;
  unsigned long long reasons = 0;
  if (nvml_->clock(nvml_->device, kSm, &mhz) != 0 || nvml_->reasons(nvml_->device, &reasons) != 0) return;
  sum_mhz_ += mhz;
  reasons_ |= reasons;
  ++readings_;
}

void SmClock::report(Timing& timing) {
  // NVML's bits nvmlClocksEventReason...; 0x1 is an idle GPU.
  constexpr std::pair<uint64_t, const char*> kReasons[] = {
      {0x2, "application clocks"}, {0x4, "power cap"},       {0x8, "hardware slowdown"},
      {0x10, "sync boost"},        {0x20, "thermal"},        {0x40, "hardware thermal"},
      {0x80, "power brake"},       {0x100, "display clocks"}};
  if (readings_ > 0) {
    timing.sm_mhz = sum_mhz_ / readings_;
    for (const auto& [bit, text] : kReasons) {
      if ((reasons_ & bit) != 0)
        timing.throttled += (timing.throttled.empty() ? "" : ", ") + std::string(text);
    }
    if (timing.throttled.empty()) timing.throttled = "none";
  }
  sum_mhz_ = 0;
  reasons_ = 0;
  readings_ = 0;
}

}  // namespace gradwire::bench
