// gradwire-bench kernels: the speed of each op relative to the device's copy bandwidth in the same run.
#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <nlohmann/json.hpp>

#include "bench/cases/kernel_cases.h"
#include "bench/commands/main.h"
#include "bench/harness/result_files.h"
#include "runtime/threads/thread_pool.h"
#include "runtime/util/error.h"
#include "trainer/cli/flags.h"

namespace gradwire::bench {
namespace {

struct KernelsOptions {
  std::vector<std::string> filter;
  std::string device = "auto";
  std::string cache = "both";
  ResultPaths results;
  std::string stop = StopRule{}.to_string();
  uint64_t min_size = 4 << 10, max_size = 0;
  uint64_t factor = 16;
  int threads = 0;
  bool list = false;
};

std::string title(const KernelCase& c) {
  return c.variant.empty() ? c.op : fmt::format("{} ({})", c.op, c.variant);
}

std::vector<KernelCase> chosen_cases(const KernelsOptions& o) {
  std::vector<KernelCase> chosen;
  std::vector<bool> used(o.filter.size());
  for (const KernelCase& c : kernel_cases()) {
    bool matches = o.filter.empty();
    for (size_t i = 0; i < o.filter.size(); ++i) {
      if (title(c).find(o.filter[i]) == std::string::npos && o.filter[i] != c.family) continue;
      matches = used[i] = true;
    }
    if (matches) chosen.push_back(c);
  }
  for (size_t i = 0; i < used.size(); ++i) {
    if (used[i]) continue;
    throw BadInput(fmt::format(
        "--filter {}: no kernel has that in its name; see gradwire-bench kernels --list", o.filter[i]));
  }
  return chosen;
}

// Returns the sizes in bytes: min, min * factor, ..., and max.
std::vector<int64_t> sizes_for(const KernelsOptions& o, const DeviceUnderTest& device) {
  constexpr int64_t kLargest = int64_t{1} << 30;
  int64_t fits = device.free_bytes() / 2 / kArenaPerSize;
  auto largest = static_cast<int64_t>(o.max_size);
  if (largest == 0) {
    for (largest = kLargest; largest > fits && largest > (1 << 20);) largest /= 2;
    largest = std::max(largest, static_cast<int64_t>(o.min_size));
  }
  if (largest < static_cast<int64_t>(o.min_size)) {
    throw BadInput(fmt::format("--max-size {} is less than --min-size {}", size_text(largest),
                               size_text(static_cast<int64_t>(o.min_size))));
  }
  if (largest > fits) {
    throw BadInput(
        fmt::format("--max-size {} is too large for {}: cases take up to {} times that, and may use half of "
                    "the {} that are free; use --max-size {}",
                    size_text(largest), device.device().name(), kArenaPerSize, size_text(device.free_bytes()),
                    size_text(fits >> 20 << 20)));
  }
  std::vector<int64_t> sizes;
  for (auto size = static_cast<int64_t>(o.min_size); size < largest; size *= static_cast<int64_t>(o.factor)) {
    sizes.push_back(size);
  }
  sizes.push_back(largest);
  return sizes;
}

// Returns whether a problem is too large for the device. A larger product would take minutes on a host.
bool too_long(const DeviceUnderTest& device, const Problem& problem) {
  constexpr double kMostHostFlops = 2e10, kMostCudaFlops = 2e13;
  return problem.flops > (device.device().is_host() ? kMostHostFlops : kMostCudaFlops);
}

nlohmann::ordered_json measure(DeviceUnderTest& device, const KernelCase& c, const Problem& problem,
                               int64_t size, bool cold, const std::string& stop) {
  auto [timing, copy_gbps] = device.time_with_copy(problem.launch, static_cast<int64_t>(problem.bytes), cold);
  double gbps = problem.bytes / timing.median_us / 1e3;
  std::string rate = "-";
  nlohmann::ordered_json gflops = nullptr;
  if (problem.flops > 0) {
    gflops = problem.flops / timing.median_us / 1e3;
    rate = fmt::format("{:.1f}", gflops.get<double>());
  }
  fmt::print(
      "{:<42} {:>6}  {:<18} {:<5} {:>7} {:>11.1f} {:>11.1f} {:>11.1f} {:>5.1f} % {:>9.2f} {:>5.0f} % {:>9}\n",
      title(c), size_text(size), problem.shape, cold ? "cold" : "warm", timing.n, timing.min_us,
      timing.median_us, timing.q3_us, 100 * timing.noise, gbps, 100 * gbps / copy_gbps, rate);
  std::fflush(stdout);
  nlohmann::ordered_json row = {{"op", c.op},
                                {"variant", c.variant},
                                {"family", c.family},
                                {"device", device.description()},
                                {"size_bytes", size},
                                {"shape", problem.shape},
                                {"cache", cold ? "cold" : "warm"}};
  add_timing(row, timing, stop);
  row["bytes"] = problem.bytes;
  row["gbps"] = gbps;
  row["copy_gbps"] = copy_gbps;
  row["copy_fraction"] = gbps / copy_gbps;
  row["gflops"] = gflops;
  return row;
}

void measure_device(const KernelsOptions& o, const std::vector<KernelCase>& cases, Device which,
                    nlohmann::ordered_json& rows) {
  const StopRule stop = StopRule::parse(o.stop);
  DeviceUnderTest device(which, stop);
  std::vector<int64_t> sizes = sizes_for(o, device);
  Arena arena(device.stream(), kArenaPerSize * sizes.back() + (int64_t{16} << 20));
  fmt::print("{}. Copies of a large buffer, read and written bytes together: {} GB/s.\n\n",
             device.description(), device.describe_copies());
  fmt::print("{:<42} {:>6}  {:<18} {:<5} {:>7} {:>11} {:>11} {:>11} {:>7} {:>9} {:>7} {:>9}\n", "op", "size",
             "shape", "cache", "n", "min us", "median us", "q3 us", "noise", "GB/s", "of copy", "GFLOP/s");
  for (const KernelCase& c : cases) {
    for (int64_t size : sizes) {
      arena.reset();
      Problem problem = c.make(arena, size);
      device.stream().synchronize();
      if (too_long(device, problem)) continue;
      // Warm and cold times are equal for sizes that exceed all caches. Measure such sizes once.
      bool uncached = problem.bytes >= 4.0 * static_cast<double>(device.flush_bytes());
      for (bool cold : {false, true}) {
        if (uncached ? !cold : o.cache == (cold ? "warm" : "cold")) continue;
        rows.push_back(measure(device, c, problem, size, cold, stop.to_string()));
      }
    }
  }
  fmt::print("\n");
}

int run(const KernelsOptions& o) {
  if (o.list) {
    for (const KernelCase& c : kernel_cases()) fmt::print("{}\n", title(c));
    return 0;
  }
  StopRule::parse(o.stop);  // throws before the measurement
  ResultFiles results(o.results);
  if (o.threads > 0) set_host_threads(o.threads);
  std::vector<KernelCase> cases = chosen_cases(o);
  nlohmann::ordered_json rows = nlohmann::ordered_json::array();
  for (Device device : devices_for(o.device)) measure_device(o, cases, device, rows);
  results.write(rows);
  return 0;
}

}  // namespace

void add_kernels(CLI::App& app, int& exit_code) {
  auto o = std::make_shared<KernelsOptions>();
  CLI::App* command = app.add_subcommand(
      "kernels",
      "Time, bandwidth and fraction of the device's copy bandwidth of every kernel, host and CUDA");
  command->add_option("--filter", o->filter,
                      "Only kernels with this in their name, or of this family; repeatable");
  add_device(*command, o->device);
  command->add_option("--cache", o->cache, "warm, cold or both; sizes that fit no cache are always cold")
      ->check(CLI::IsMember({"warm", "cold", "both"}));
  command->add_option("--min-size", o->min_size, "Smallest size of the op's main array, e.g. 4K")
      ->transform(size_value(false))
      ->check(CLI::Range(uint64_t{64}, uint64_t{1} << 36));
  command->add_option("--max-size", o->max_size, "Largest size (default: 1G, or what memory allows)")
      ->transform(size_value(false))
      ->check(CLI::Range(uint64_t{64}, uint64_t{1} << 36));
  command->add_option("--factor", o->factor, "Factor from one size to the next")
      ->check(CLI::Range(2, 1 << 20));
  command->add_option("--threads", o->threads, "Host threads (default: GRADWIRE_THREADS, or all cores)")
      ->check(CLI::Range(1, 4096));
  add_stop(*command, o->stop);
  command->add_flag("--list", o->list, "List the cases and exit");
  add_result_files(*command, o->results, "Write all measurements to FILE");
  command->callback([o, &exit_code] { exit_code = run(*o); });
}

}  // namespace gradwire::bench
