// gradwire-bench hook: the cost of compression per step, without communication: all work between a bucket of
// gradients and the bucket of averaged gradients in a world of 1, compared with PyTorch's hook.
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <thread>

#include "bench/baselines/pytorch_baseline.h"
#include "bench/cases/collective_case.h"
#include "bench/commands/main.h"
#include "bench/harness/measure.h"
#include "bench/harness/result_files.h"
#include "collectives/codec/codec.h"
#include "collectives/communicator/communicator.h"
#include "collectives/reducer/buckets.h"
#include "kernels/math/random.h"
#include "kernels/wire/format.h"
#include "runtime/threads/thread_pool.h"

namespace gradwire::bench {
namespace {

using Clock = std::chrono::steady_clock;

struct HookOptions {
  std::string model = "vit_b_32";
  std::string device = "auto";
  std::vector<std::string> compression;
  bool baseline = false;
  std::string python = "/usr/bin/python3";
  std::string stop = StopRule{}.to_string();
  int threads = 0;
  ResultPaths results;
};

// The gradients of a model in one bucket, and the values to which they are reset before every step.
struct GradientSet {
  std::vector<GradientTensor> tensors;
  GradientLayout layout;      // 16-byte aligned, as in the reducer
  int64_t elements = 0;       // without gaps
  std::vector<float> values;  // without gaps
  Buffer fresh, gradients;

  GradientSet(const std::string& model, const Stream& stream)
      : tensors(gradients_of(model)), layout(lay_out(tensors, 4, kOneBucket)) {
    elements = elements_of(tensors);
    values.resize(static_cast<size_t>(elements));
    parallel_for(elements, 1 << 16, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) values[i] = rough_normal(philox(1, 0, static_cast<uint64_t>(i)));
    });
    fresh = make_buffer<float>(stream.device(), layout.elements);
    gradients = make_buffer<float>(stream.device(), layout.elements);
    fill_zero(stream, fresh.data(), fresh.bytes());
    const float* from = values.data();
    for (size_t i = 0; i < tensors.size(); ++i) {
      auto count = tensors[i].count();
      copy(stream, fresh.as<float>() + layout.offsets[i], from, static_cast<size_t>(count) * 4);
      from += count;
    }
    stream.synchronize();
  }

  void restore(const Stream& stream) const {
    copy(stream, gradients.data(), fresh.data(), fresh.bytes());
    stream.synchronize();
  }
};

// The compression and decompression of a spec.
class CompressionPath {
 public:
  virtual ~CompressionPath() = default;
  virtual void run(const Stream& stream) = 0;
  virtual int64_t extra_bytes() const = 0;
  // Returns the minimum bytes per element.
  virtual double floor_bytes() const = 0;
};

// Returns the whole set as one bucket, on a transport without peers.
BucketContext one_bucket(Communicator& comm, const CompressionSpec& spec, const GradientSet& set,
                         const Stream& stream, const uint64_t* step) {
  BucketContext context = bucket_context(
      {.comm = comm, .spec = spec, .stream = stream, .step = step, .gradients = set.gradients.as<float>()},
      set.tensors, set.layout, set.layout.buckets.at(0), "the model");
  context.schedule = ring(1);
  return context;
}

// A wire format: gradient + residual -> wire, residual; wire -> gradient. Two passes, because in a real run
// the encoded data are sent in between.
class WirePath final : public CompressionPath {
 public:
  WirePath(const CompressionSpec& spec, const GradientSet& set, const Stream& stream)
      : format_(spec.wire),
        comm_(Communicator::create_single(stream.device())),
        residual_(one_bucket(*comm_, spec, set, stream, nullptr), spec.policy.keeps_errors()),
        workspace_(stream.device(), residual_.workspace_bytes()),
        wire_(stream.device(), static_cast<size_t>(format_->bytes(set.layout.elements))) {
    residual_.bind(workspace_.data());
    fill_zero(stream, wire_.data(), wire_.bytes());
    encode_ = {.own = set.gradients.as<const float>(),
               .residual = residual_.values(),
               .wire = wire_.data(),
               .count = set.layout.elements};
    encode_.rounding.mode = spec.rounding;
    decode_ = {.wire = wire_.data(), .out = set.gradients.as<float>(), .count = set.layout.elements};
  }
  void run(const Stream& stream) override {
    BucketPhases no_phases;
    residual_.load(stream, no_phases);
    format_->reduce_encode(stream, encode_);
    format_->decode(stream, decode_);
    residual_.store(stream, no_phases);
  }
  int64_t extra_bytes() const override {
    return residual_.bytes() + static_cast<int64_t>(workspace_.bytes() + wire_.bytes());
  }
  double floor_bytes() const override {
    const double residual = static_cast<double>(residual_.bytes()) / static_cast<double>(decode_.count);
    return 8 + 2 * format_->bytes_per_value() + 2 * residual;
  }

 private:
  const Wire format_;
  std::unique_ptr<Communicator> comm_;
  Residual residual_;
  Buffer workspace_, wire_;
  ReduceEncode encode_;
  Decode decode_;
};

// The codec that the reducer runs for a bucket. The transport has no peers.
class CodecPath final : public CompressionPath {
 public:
  CodecPath(const CompressionSpec& spec, const GradientSet& set, const Stream& stream)
      : comm_(Communicator::create_single(stream.device())),
        step_(make_buffer<uint64_t>(stream.device(), 1)),
        spec_(spec) {
    fill_zero(stream, step_.data(), step_.bytes());
    codec_ = make_codec(one_bucket(*comm_, spec, set, stream, step_.as<const uint64_t>()));
    workspace_ = Buffer(stream.device(), codec_->workspace_bytes());
    codec_->bind(workspace_.data());
  }
  void run(const Stream& stream) override { codec_->run(stream, spec_.policy.start + steps_++); }
  int64_t extra_bytes() const override {
    return codec_->state_bytes() + static_cast<int64_t>(workspace_.bytes());
  }
  double floor_bytes() const override {
    if (spec_.method == CompressionSpec::Method::randk) return spec_.policy.keeps_errors() ? 16 : 8;
    if (spec_.method != CompressionSpec::Method::powersgd) return 0;
    if (spec_.alternate) return spec_.policy.keeps_errors() ? 16 : 8;
    return spec_.policy.keeps_errors() ? 20 : 12;
  }

 private:
  std::unique_ptr<Communicator> comm_;
  Buffer step_, workspace_;
  std::unique_ptr<Codec> codec_;
  CompressionSpec spec_;
  int64_t steps_ = 0;
};

std::unique_ptr<CompressionPath> make_path(const CompressionSpec& spec, const GradientSet& set,
                                           const Stream& stream) {
  if (spec.method == CompressionSpec::Method::wire && !spec.wire->exact) {
    return std::make_unique<WirePath>(spec, set, stream);
  }
  return std::make_unique<CodecPath>(spec, set, stream);
}

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

double run_us(CompressionPath& path, const GradientSet& set, const Stream& stream) {
  set.restore(stream);
  auto start = Clock::now();
  path.run(stream);
  stream.synchronize();
  return std::chrono::duration<double, std::micro>(Clock::now() - start).count();
}

nlohmann::ordered_json measure(const HookOptions& o, const CompressionSpec& spec, const GradientSet& set,
                               DeviceUnderTest& device, PyTorchBaseline* baseline) {
  constexpr int kWarmUp = 3;
  // OpenMP's threads spin for a moment after work. Wait until the threads stop.
  constexpr std::chrono::milliseconds kPause{20};
  const Stream& stream = device.stream();
  std::unique_ptr<CompressionPath> path = make_path(spec, set, stream);
  std::string baseline_name;
  if (baseline != nullptr && PyTorchBaseline::has(spec)) baseline_name = baseline->prepare(spec);
  const StopRule stop = StopRule::parse(o.stop);
  Samples samples, baseline_samples;
  std::vector<double> copies;  // before, after two steps, and after all steps
  const int64_t like_powersgd = 24 * set.elements;
  Clock::time_point start;
  for (int step = -kWarmUp; step <= 0 || !samples.done(stop, seconds_since(start)); ++step) {
    std::this_thread::sleep_for(kPause);
    if (step == 0 || step == 2) copies.push_back(device.copy_gbps(like_powersgd, true));
    if (step == 0) start = Clock::now();
    double us = run_us(*path, set, stream);
    if (step < 0) continue;
    samples.add(us);
    device.sm_clock().sample();
    if (!baseline_name.empty()) baseline_samples.add(baseline->run_ms() * 1e3);
  }
  copies.push_back(device.copy_gbps(like_powersgd, true));
  std::sort(copies.begin(), copies.end());
  const double copy_gbps = copies[copies.size() / 2];
  Timing timing = samples.timing(), baseline_timing = baseline_samples.timing();
  device.sm_clock().report(timing);
  double floor_ms = path->floor_bytes() * static_cast<double>(set.elements) / copy_gbps / 1e6;
  nlohmann::ordered_json row = {{"spec", spec.to_string()},
                                {"device", device.device().name()},
                                {"model", o.model},
                                {"elements", set.elements},
                                {"ms", timing.median_us / 1e3},
                                {"floor_ms", floor_ms},
                                {"copy_gbps", copy_gbps},
                                {"extra_bytes", path->extra_bytes()},
                                {"baseline", nullptr},
                                {"baseline_ms", nullptr},
                                {"speedup", nullptr}};
  add_timing(row, timing, stop.to_string());
  std::string baseline_text = "-", baseline_min = "-", ratio = "-";
  if (!baseline_name.empty()) {
    double speedup = baseline_timing.median_us / timing.median_us;
    row["baseline"] = baseline_name;
    row["baseline_ms"] = baseline_timing.median_us / 1e3;
    row["speedup"] = speedup;
    baseline_text = fmt::format("{:.2f}", baseline_timing.median_us / 1e3);
    baseline_min = fmt::format("{:.2f}", baseline_timing.min_us / 1e3);
    ratio = fmt::format("{:.2f}x", speedup);
  }
  fmt::print("{:<28} {:>5} {:>9.2f} {:>9.2f} {:>5.1f} % {:>9.2f} {:>8.1f} {:>10} {:>9} {:>9} {:>8}  {}\n",
             spec.to_string(), timing.n, timing.median_us / 1e3, timing.min_us / 1e3, 100 * timing.noise,
             floor_ms, copy_gbps, size_text(path->extra_bytes()), baseline_text, baseline_min, ratio,
             baseline_name);
  std::fflush(stdout);
  return row;
}

int run(const HookOptions& o) {
  StopRule::parse(o.stop);  // throws before the measurement
  ResultFiles results(o.results);
  if (o.threads > 0) set_host_threads(o.threads);
  std::vector<CompressionSpec> specs;
  for (const std::string& text : o.compression) specs.push_back(CompressionSpec::parse(text));
  gradients_of(o.model);  // throws before the measurement if the model is unknown
  nlohmann::ordered_json rows = nlohmann::ordered_json::array();
  for (Device which : devices_for(o.device)) {
    DeviceUnderTest device(which, StopRule::parse("50ms"));  // of the copies
    GradientSet set(o.model, device.stream());
    std::unique_ptr<PyTorchBaseline> baseline;
    if (o.baseline)
      baseline = std::make_unique<PyTorchBaseline>(o.python, which, host_threads(), set.tensors, set.values);
    fmt::print("{}: {} gradients in {} tensors, one bucket, on {}; medians and minima.\n\n", o.model,
               set.elements, set.tensors.size(), device.description());
    fmt::print("{:<28} {:>5} {:>9} {:>9} {:>7} {:>9} {:>8} {:>10} {:>9} {:>9} {:>8}  {}\n", "spec", "n", "ms",
               "min", "noise", "floor ms", "copy", "extra", "base ms", "min", "speedup", "baseline");
    for (const CompressionSpec& spec : specs) rows.push_back(measure(o, spec, set, device, baseline.get()));
    fmt::print("\n");
  }
  results.write(rows);
  return 0;
}

}  // namespace

void add_hook(CLI::App& app, int& exit_code) {
  auto o = std::make_shared<HookOptions>();
  if (access(o->python.c_str(), X_OK) != 0) o->python = "python3";
  o->compression = {"bf16", "fp8", "powersgd:rank=1", "powersgd:rank=4"};
  CLI::App* command = app.add_subcommand(
      "hook", "The cost of compression alone per step on a model's gradients, compared with PyTorch's hook");
  command->add_option("--model", o->model, "A ViT of `gradwire train`, resnet18 or resnet50");
  add_device(*command, o->device);
  command->add_option("--compression", o->compression, "Compression spec; repeatable");
  command->add_flag("--baseline", o->baseline, "Also run PyTorch's hook, alternating with Gradwire");
  command->add_option("--python", o->python, "A Python interpreter with torch");
  add_stop(*command, o->stop);
  command
      ->add_option("--threads", o->threads,
                   "Host threads of both sides (default: GRADWIRE_THREADS, or all cores)")
      ->check(CLI::Range(1, 4096));
  add_result_files(*command, o->results);
  command->callback([o, &exit_code] { exit_code = run(*o); });
}

}  // namespace gradwire::bench
