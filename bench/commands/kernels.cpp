// gradwire-bench kernels: the speed of each op relative to the device's copy bandwidth in the same run.
#include <fmt/format.h>

#include <algorithm>
#include <cstdio>

#include "bench/cases/kernel_cases.h"
#include "bench/harness/command.h"
#include "runtime/util/error.h"

namespace gradwire::bench {
namespace {

class Kernels final : public Command {
 public:
  explicit Kernels(CLI::App& app)
      : Command(
            app, "kernels",
            "Time, bandwidth and fraction of the device's copy bandwidth of every kernel, host and CUDA") {
    add("--filter", filter_, "Only kernels with this in their name, or of this family; repeatable");
    add_device();
    add("--cache", cache_, "warm, cold or both; sizes that fit no cache are always cold",
        CLI::IsMember({"warm", "cold", "both"}));
    add_size("--min-size", min_size_, "Smallest size of the op's main array, e.g. 4K", 64);
    add_size("--max-size", max_size_, "Largest size (default: 1G, or what memory allows)", 64);
    add("--factor", factor_, "Factor from one size to the next", CLI::Range(2, 1 << 20));
    add_threads("Host threads");
    add_stop();
    add("--list", list_, "List the cases and exit");
    add_files("Write all measurements to FILE");
    columns_ = {{"op", "title", -42},
                {"size", "size", 6},
                {"shape", "shape", -18, -1, "", 1, "  "},
                {"cache", "cache", -5},
                {"n", "n", 7},
                {"min us", "min_us", 11, 1},
                {"median us", "median_us", 11, 1},
                {"q3 us", "q3_us", 11, 1},
                {"noise", "noise", 7, 1, " %", 100},
                {"GB/s", "gbps", 9, 2},
                {"of copy", "copy_fraction", 7, 0, " %", 100},
                {"GFLOP/s", "gflops", 9, 1}};
  }

  int run() override {
    if (list_) {
      for (const KernelCase& c : kernel_cases()) fmt::print("{}\n", c.title());
      return 0;
    }
    open();
    const std::vector<KernelCase> cases = chosen_cases();
    for (Device which : devices_for(device_)) {
      DeviceUnderTest device(which, stop_);
      const std::vector<int64_t> sizes = sizes_for(device);
      Arena arena(device.stream, kArenaPerSize * sizes.back() + (int64_t{16} << 20));
      fmt::print("{}. Copies of a large buffer, read and written bytes together: {} GB/s.\n\n",
                 device.description, device.describe_copies());
      print_heading();
      size_t done = 0;
      for (const KernelCase& c : cases) {
        for (int64_t size : sizes) {
          arena.reset();
          measure(device, c, c.make(arena, size), size);
          case_done(++done, cases.size() * sizes.size());
        }
      }
      fmt::print("\n");
    }
    write_files();
    return 0;
  }

 private:
  std::vector<KernelCase> chosen_cases() const {
    std::vector<KernelCase> chosen;
    std::vector<bool> used(filter_.size());
    for (const KernelCase& c : kernel_cases()) {
      bool matches = filter_.empty();
      for (size_t i = 0; i < filter_.size(); ++i) {
        if (c.title().find(filter_[i]) == std::string::npos && filter_[i] != c.family) continue;
        matches = used[i] = true;
      }
      if (matches) chosen.push_back(c);
    }
    for (size_t i = 0; i < used.size(); ++i) {
      if (used[i]) continue;
      throw BadInput("--filter {}: no kernel has that in its name; see gradwire-bench kernels --list",
                     filter_[i]);
    }
    return chosen;
  }

  // Returns the sizes in bytes: min, min * factor, ..., and max.
  std::vector<int64_t> sizes_for(const DeviceUnderTest& device) const {
    const int64_t free = device.free_bytes(), fits = free / 2 / kArenaPerSize;
    const auto least = static_cast<int64_t>(min_size_);
    auto largest = static_cast<int64_t>(max_size_);
    if (largest == 0) {
      for (largest = int64_t{1} << 30; largest > fits && largest > (1 << 20);) largest /= 2;
      largest = std::max(largest, least);
    }
    if (largest < least) {
      throw BadInput("--max-size {} is less than --min-size {}", size_text(largest), size_text(least));
    }
    if (largest > fits) {
      throw BadInput(
          "--max-size {} is too large for {}: cases take up to {} times that, and may use half of "
          "the {} that are free; use --max-size {}",
          size_text(largest), device.device.name(), kArenaPerSize, size_text(free),
          size_text(fits >> 20 << 20));
    }
    std::vector<int64_t> sizes;
    for (int64_t size = least; size < largest; size *= static_cast<int64_t>(factor_)) sizes.push_back(size);
    sizes.push_back(largest);
    return sizes;
  }

  void measure(DeviceUnderTest& device, const KernelCase& c, const Problem& problem, int64_t size) {
    // A larger product would take minutes.
    constexpr double kMaxHostFlops = 2e10, kMaxReferenceFlops = 2e8, kMaxCudaFlops = 2e13;
    device.stream.synchronize();
    if (problem.flops > (device.device.is_cuda() ? kMaxCudaFlops
                         : c.fast_on_host        ? kMaxHostFlops
                                                 : kMaxReferenceFlops))
      return;
    // Warm and cold times are equal for sizes that exceed all caches. Measure such sizes once.
    const bool uncached = problem.bytes >= 4.0 * static_cast<double>(device.flush_bytes);
    for (bool cold : {false, true}) {
      if (uncached ? !cold : cache_ == (cold ? "warm" : "cold")) continue;
      const auto [timing, copy_gbps] =
          device.time_with_copy(problem.launch, static_cast<int64_t>(problem.bytes), cold);
      const double gbps = problem.bytes / timing.median_us / 1e3;
      above_copy_ += gbps > 1.1 * copy_gbps ? 1 : 0;
      Json row = {{"op", c.op},
                  {"variant", c.variant},
                  {"family", c.family},
                  {"device", device.description},
                  {"size_bytes", size},
                  {"shape", problem.shape},
                  {"cache", cold ? "cold" : "warm"}};
      row.update(timing_json(timing));
      row.update({{"bytes", problem.bytes},
                  {"gbps", gbps},
                  {"copy_gbps", copy_gbps},
                  {"copy_fraction", gbps / copy_gbps},
                  {"gflops", problem.flops > 0 ? Json(problem.flops / timing.median_us / 1e3) : Json()}});
      add_row(row, {{"title", c.title()}, {"size", size_text(size)}});
    }
  }

  std::vector<std::string> filter_;
  std::string cache_ = "both";
  uint64_t min_size_ = 4 << 10, max_size_ = 0, factor_ = 16;
  bool list_ = false;
};

}  // namespace

std::unique_ptr<Command> make_kernels(CLI::App& app) {
  return std::make_unique<Kernels>(app);
}

}  // namespace gradwire::bench
