// gradwire-bench orthonormalize: all of a model's P factors in one launch, compared with torch.linalg.qr on
// the same matrices.
#include <fmt/format.h>
#include <unistd.h>

#include <cstdio>
#include <nlohmann/json.hpp>
#include <optional>

#include "bench/baselines/pytorch_baseline.h"
#include "bench/cases/models.h"
#include "bench/commands/commands.h"
#include "bench/harness/measure.h"
#include "collectives/codec/codec.h"
#include "kernels/math/random.h"
#include "kernels/powersgd/orthonormalize.h"
#include "runtime/threads/thread_pool.h"
#include "runtime/util/error.h"
#include "runtime/util/output_file.h"

namespace gradwire::bench {
namespace {

struct OrthonormalizeOptions {
  std::string model = "vit_b_32";
  std::string device = "auto";
  std::vector<int> ranks = {4, 32};
  bool baseline = false;
  std::string python = "/usr/bin/python3";
  int steps = 10;
  std::string json;
};

// The P factors of every matrix that PowerSGD would compress at this rank.
struct Factors {
  std::vector<MatrixDescriptor> matrices;
  std::vector<GradientTensor> shapes;
  std::vector<float> values;

  Factors(const std::string& model, int rank) {
    CompressionSpec spec;
    spec.method = CompressionSpec::Method::powersgd;
    spec.rank = rank;
    int64_t p = 0, q = 0;
    for (const GradientTensor& t : gradients_of(model)) {
      if (t.shape.size() < 2) continue;
      const int64_t rows = t.shape[0], cols = t.count() / rows;
      const int r = powersgd_rank(spec, rows, cols);
      if (r == 0) continue;
      matrices.push_back({0, p, q, static_cast<int32_t>(rows), static_cast<int32_t>(cols), r,
                          static_cast<int32_t>(matrices.size())});
      shapes.push_back({t.name, {rows, r}});
      p += rows * r;
      q += cols * r;
    }
    if (matrices.empty()) {
      throw BadInput(
          fmt::format("--rank {}: PowerSGD would compress no tensor of {}; use a smaller rank", rank, model));
    }
    values.resize(static_cast<size_t>(p));
    for (int64_t i = 0; i < p; ++i) values[i] = rough_normal(philox(1, 0, static_cast<uint64_t>(i)));
  }
};

nlohmann::ordered_json measure(const OrthonormalizeOptions& o, int rank, DeviceUnderTest& device) {
  constexpr int kWarmUp = 3;
  const Factors factors(o.model, rank);
  const Stream& stream = device.stream();
  const auto count = static_cast<int64_t>(factors.values.size());
  MatrixTable table(stream, factors.matrices);
  Buffer in = make_buffer<float>(stream.device(), count), out = make_buffer<float>(stream.device(), count);
  Buffer flags = make_buffer<int32_t>(stream.device(), table.count());
  to_device(stream, in.as<float>(), std::span<const float>(factors.values));
  const Orthonormalize args{.table = &table,
                            .which = Factor::p,
                            .in = in.as<const float>(),
                            .out = out.as<float>(),
                            .flags = flags.as<int32_t>()};
  std::optional<PyTorchBaseline> baseline;
  std::string baseline_name;
  if (o.baseline) {
    baseline.emplace(o.python, device.device(), host_threads(), factors.shapes, factors.values);
    baseline_name = baseline->prepare_qr();
  }
  std::vector<double> times_us, baseline_us;
  for (int step = -kWarmUp; step < o.steps; ++step) {
    double us = device.time_once_us([&](const Stream& s) { orthonormalize(s, args); });
    if (step < 0) continue;
    times_us.push_back(us);
    if (baseline) baseline_us.push_back(baseline->run_ms() * 1e3);
  }
  const Timing timing = summarize(times_us);
  nlohmann::ordered_json row = {{"model", o.model},
                                {"device", device.device().name()},
                                {"rank", rank},
                                {"matrices", table.count()},
                                {"ms", timing.median_us / 1e3},
                                {"baseline", nullptr},
                                {"baseline_ms", nullptr},
                                {"speedup", nullptr}};
  std::string baseline_text = "-", ratio = "-";
  if (baseline) {
    const Timing baseline_timing = summarize(baseline_us);
    row["baseline"] = baseline_name;
    row["baseline_ms"] = baseline_timing.median_us / 1e3;
    row["speedup"] = baseline_timing.median_us / timing.median_us;
    baseline_text = fmt::format("{:.3f}", baseline_timing.median_us / 1e3);
    ratio = fmt::format("{:.1f}x", baseline_timing.median_us / timing.median_us);
  }
  fmt::print("{:>4} {:>9} {:>10.3f} {:>10} {:>8}  {}\n", rank, table.count(), timing.median_us / 1e3,
             baseline_text, ratio, baseline_name);
  std::fflush(stdout);
  return row;
}

int run(const OrthonormalizeOptions& o) {
  OutputFile json(o.json);
  for (int rank : o.ranks) Factors(o.model, rank);  // throws before the measurement on bad input
  nlohmann::ordered_json rows = nlohmann::ordered_json::array();
  for (Device which : devices_for(o.device)) {
    constexpr double kBudgetMs = 50;
    DeviceUnderTest device(which, kBudgetMs);
    fmt::print("The P factors of {} on {}; medians of {} runs.\n\n", o.model, device.description(), o.steps);
    fmt::print("{:>4} {:>9} {:>10} {:>10} {:>8}  {}\n", "rank", "matrices", "ms", "base ms", "speedup",
               "baseline");
    for (int rank : o.ranks) rows.push_back(measure(o, rank, device));
    fmt::print("\n");
  }
  json.write(rows.dump(1) + "\n");
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
  command->add_option("--rank", o->ranks, "PowerSGD's rank; repeatable")
      ->check(CLI::Range(1, kMaxPowerSgdRank));
  command->add_flag("--baseline", o->baseline, "Also run torch.linalg.qr, alternating with Gradwire");
  command->add_option("--python", o->python, "A Python interpreter with torch");
  command->add_option("--steps", o->steps, "Measured runs")->check(CLI::Range(1, 100000));
  add_json(*command, o->json);
  command->callback([o, &exit_code] { exit_code = run(*o); });
}

}  // namespace gradwire::bench
