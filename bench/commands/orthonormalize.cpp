// gradwire-bench orthonormalize: all of a model's P factors in one launch, compared with torch.linalg.qr on
// the same matrices.
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <optional>

#include "bench/baselines/pytorch_baseline.h"
#include "bench/cases/collective_case.h"
#include "bench/commands/main.h"
#include "bench/harness/measure.h"
#include "bench/harness/result_files.h"
#include "collectives/codec/codec.h"
#include "kernels/math/random.h"
#include "kernels/powersgd/orthonormalize.h"
#include "runtime/threads/thread_pool.h"
#include "runtime/util/error.h"

namespace gradwire::bench {
namespace {

struct OrthonormalizeOptions {
  std::string model = "vit_b_32";
  std::string matrices;  // COUNTxROWSxRANK instead of a model's
  std::string device = "auto";
  std::vector<int> ranks = {4, 32};
  bool baseline = false;
  std::string python = "/usr/bin/python3";
  std::string stop = StopRule{}.to_string();
  ResultPaths results;
};

// The P factors of every matrix that PowerSGD would compress at this rank, or equal matrices.
struct Factors {
  std::vector<MatrixDescriptor> matrices;
  std::vector<GradientTensor> shapes;
  std::vector<float> values;

  Factors(const std::string& model, int rank) {
    CompressionSpec spec;
    spec.method = CompressionSpec::Method::powersgd;
    spec.rank = rank;
    for (const GradientTensor& t : gradients_of(model)) {
      if (t.shape.size() < 2) continue;
      const int64_t rows = t.shape[0], cols = t.count() / rows;
      const int r = powersgd_rank(spec, rows, cols);
      if (r == 0) continue;
      add(t.name, rows, cols, r);
    }
    if (matrices.empty()) {
      throw BadInput(
          fmt::format("--rank {}: PowerSGD would compress no tensor of {}; use a smaller rank", rank, model));
    }
    fill();
  }

  explicit Factors(const std::string& text) {
    int count = 0, rows = 0, rank = 0, end = 0;
    const int read = std::sscanf(text.c_str(), "%dx%dx%d%n", &count, &rows, &rank, &end);
    const bool whole = read == 3 && static_cast<size_t>(end) == text.size();
    if (!whole || count < 1 || rank < 1 || rank > std::min(rows, kMaxPowerSgdRank) || rows > (1 << 20)) {
      throw BadInput(
          fmt::format("--matrices '{}' is not COUNTxROWSxRANK, such as 24x1024x256, with RANK up to {}", text,
                      kMaxPowerSgdRank));
    }
    for (int i = 0; i < count; ++i) add(fmt::format("matrix {}", i), rows, rank, rank);
    fill();
  }

 private:
  void add(const std::string& name, int64_t rows, int64_t cols, int rank) {
    matrices.push_back({0, p_, q_, static_cast<int32_t>(rows), static_cast<int32_t>(cols), rank,
                        static_cast<int32_t>(matrices.size())});
    shapes.push_back({name, {rows, rank}});
    p_ += rows * rank;
    q_ += cols * rank;
  }
  void fill() {
    values.resize(static_cast<size_t>(p_));
    for (int64_t i = 0; i < p_; ++i) values[i] = rough_normal(philox(1, 0, static_cast<uint64_t>(i)));
  }

  int64_t p_ = 0, q_ = 0;
};

std::vector<Factors> factors_of(const OrthonormalizeOptions& o) {
  if (!o.matrices.empty()) return {Factors(o.matrices)};
  std::vector<Factors> all;
  for (int rank : o.ranks) all.emplace_back(o.model, rank);
  return all;
}

void print_row(const nlohmann::ordered_json& row, const Timing& timing) {
  const bool compared = !row["baseline"].is_null();
  fmt::print("{:>4} {:>9} {:>5} {:>10.3f} {:>5.1f} % {:>10} {:>8}  {}\n", row["rank"].get<int>(),
             row["matrices"].get<int>(), timing.n, timing.median_us / 1e3, 100 * timing.noise,
             compared ? fmt::format("{:.3f}", row["baseline_ms"].get<double>()) : "-",
             compared ? fmt::format("{:.1f}x", row["speedup"].get<double>()) : "-",
             compared ? row["baseline"].get<std::string>() : "");
  std::fflush(stdout);
}

nlohmann::ordered_json measure(const OrthonormalizeOptions& o, const Factors& factors,
                               DeviceUnderTest& device) {
  constexpr int kWarmUp = 3;
  const Stream& stream = device.stream();
  const auto count = static_cast<int64_t>(factors.values.size());
  MatrixTable table(stream, factors.matrices);
  const int rank = table.max_rank();
  Buffer in = make_buffer<float>(stream.device(), count), out = make_buffer<float>(stream.device(), count);
  Buffer flags = make_buffer<int32_t>(stream.device(), table.count());
  Buffer scratch = make_buffer<double>(stream.device(), table.scratch_doubles());
  to_device(stream, in.as<float>(), std::span<const float>(factors.values));
  const Orthonormalize args{.table = &table,
                            .which = Factor::p,
                            .in = in.as<const float>(),
                            .out = out.as<float>(),
                            .flags = flags.as<int32_t>(),
                            .scratch = scratch.as<double>()};
  std::optional<PyTorchBaseline> baseline;
  std::string baseline_name;
  if (o.baseline) {
    baseline.emplace(o.python, device.device(), host_threads(), factors.shapes, factors.values);
    baseline_name = baseline->prepare_qr();
  }
  const StopRule stop = StopRule::parse(o.stop);
  using Clock = std::chrono::steady_clock;
  Samples samples, baseline_samples;
  Clock::time_point start;
  for (int step = -kWarmUp;
       step <= 0 || !samples.done(stop, std::chrono::duration<double>(Clock::now() - start).count());
       ++step) {
    if (step == 0) start = Clock::now();
    double us = device.time_once_us([&](const Stream& s) { orthonormalize(s, args); });
    if (step < 0) continue;
    samples.add(us);
    device.sm_clock().sample();
    if (baseline) baseline_samples.add(baseline->run_ms() * 1e3);
  }
  Timing timing = samples.timing();
  device.sm_clock().report(timing);
  nlohmann::ordered_json row = {{"model", o.matrices.empty() ? o.model : o.matrices},
                                {"device", device.device().name()},
                                {"rank", rank},
                                {"matrices", table.count()},
                                {"ms", timing.median_us / 1e3},
                                {"baseline", nullptr},
                                {"baseline_ms", nullptr},
                                {"speedup", nullptr}};
  add_timing(row, timing, stop.to_string());
  if (baseline) {
    const double baseline_us = baseline_samples.timing().median_us;
    row["baseline"] = baseline_name;
    row["baseline_ms"] = baseline_us / 1e3;
    row["speedup"] = baseline_us / timing.median_us;
  }
  print_row(row, timing);
  return row;
}

int run(const OrthonormalizeOptions& o) {
  StopRule::parse(o.stop);  // throws before the measurement
  ResultFiles results(o.results);
  const std::vector<Factors> factors = factors_of(o);  // throws before the measurement on bad input
  nlohmann::ordered_json rows = nlohmann::ordered_json::array();
  for (Device which : devices_for(o.device)) {
    DeviceUnderTest device(which, StopRule{});
    fmt::print("The P factors of {} on {}; medians.\n\n", o.matrices.empty() ? o.model : o.matrices,
               device.description());
    fmt::print("{:>4} {:>9} {:>5} {:>10} {:>7} {:>10} {:>8}  {}\n", "rank", "matrices", "n", "ms", "noise",
               "base ms", "speedup", "baseline");
    for (const Factors& each : factors) rows.push_back(measure(o, each, device));
    fmt::print("\n");
  }
  results.write(rows);
  return 0;
}

}  // namespace

void add_orthonormalize(CLI::App& app, int& exit_code) {
  auto o = std::make_shared<OrthonormalizeOptions>();
  if (access(o->python.c_str(), X_OK) != 0) o->python = "python3";
  CLI::App* command = app.add_subcommand(
      "orthonormalize", "All P factors of a model in one launch, compared with torch.linalg.qr");
  command->add_option("--model", o->model, "A ViT of `gradwire train`, resnet18 or resnet50");
  add_device(*command, o->device);
  command->add_option("--matrices", o->matrices, "COUNTxROWSxRANK: equal matrices instead of a model's");
  command->add_option("--rank", o->ranks, "PowerSGD's rank; repeatable")
      ->check(CLI::Range(1, kMaxPowerSgdRank));
  command->add_flag("--baseline", o->baseline, "Also run torch.linalg.qr, alternating with Gradwire");
  command->add_option("--python", o->python, "A Python interpreter with torch");
  add_stop(*command, o->stop);
  add_result_files(*command, o->results);
  command->callback([o, &exit_code] { exit_code = run(*o); });
}

}  // namespace gradwire::bench
