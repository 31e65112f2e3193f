// gradwire-bench hook: the cost of compression per step, without communication: all work between a bucket of
// gradients and the bucket of averaged gradients in a world of 1, compared with PyTorch's hook.
// gradwire-bench orthonormalize: all of a model's P factors in one launch, compared with torch.linalg.qr on
// the same matrices.
#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <optional>
#include <thread>

#include "bench/harness/command.h"
#include "collectives/codec/pipeline.h"
#include "collectives/communicator/communicator.h"
#include "collectives/reducer/buckets.h"
#include "kernels/math/random.h"
#include "kernels/powersgd/orthonormalize.h"
#include "kernels/wire/format.h"
#include "runtime/threads/child_process.h"
#include "runtime/threads/thread_pool.h"
#include "runtime/util/error.h"
#include "runtime/util/file.h"
#include "trainer/model/parameters.h"

namespace gradwire::bench {

extern const char* const kPyTorchHookScript;  // bench/baselines/pytorch_hook.py, embedded by CMake

namespace {

using Clock = std::chrono::steady_clock;

// Returns torchvision's ResNets (He et al., arXiv 1512.03385): basic blocks for 18, bottlenecks for 50.
std::vector<GradientTensor> resnet(bool bottleneck, const std::vector<int>& blocks) {
  std::vector<GradientTensor> all;
  // A convolution and its batch norm.
  auto conv = [&](const std::string& name, const std::string& norm, int64_t out, int64_t in, int64_t side) {
    all.push_back({name + ".weight", {out, in, side, side}});
    all.push_back({norm + ".weight", {out}});
    all.push_back({norm + ".bias", {out}});
  };
  conv("conv1", "bn1", 64, 3, 7);
  const int64_t expansion = bottleneck ? 4 : 1;
  int64_t in = 64, width = 64;
  for (size_t stage = 0; stage < blocks.size(); ++stage, width *= 2) {
    for (int b = 0; b < blocks[stage]; ++b) {
      const std::string at = fmt::format("layer{}.{}.", stage + 1, b);
      const int64_t out = width * expansion;
      const int64_t first = bottleneck ? 1 : 3;
      conv(at + "conv1", at + "bn1", width, in, first);
      conv(at + "conv2", at + "bn2", width, width, 3);
      if (bottleneck) conv(at + "conv3", at + "bn3", out, width, 1);
      if (in != out || (stage > 0 && b == 0)) {
        conv(at + "downsample.0", at + "downsample.1", out, in, 1);
      }
      in = out;
    }
  }
  all.push_back({"fc.weight", {1000, in}});
  all.push_back({"fc.bias", {1000}});
  std::reverse(all.begin(), all.end());
  return all;
}

// Returns the gradients of a ViT of the trainer, of resnet18 or of resnet50, in the order in which backward
// finishes them. Throws BadInput, which lists the known names, for any other name.
std::vector<GradientTensor> gradients_of(const std::string& model) {
  if (model == "resnet18") return resnet(false, {2, 2, 2, 2});
  if (model == "resnet50") return resnet(true, {3, 4, 6, 3});
  std::vector<std::string> vits = model_names();
  if (std::find(vits.begin(), vits.end(), model) == vits.end()) {
    throw BadInput("--model '{}' is unknown; use resnet18, resnet50, {}", model, fmt::join(vits, ", "));
  }
  std::vector<GradientTensor> all;
  for (const VitParameter& p : vit_parameters(named_model(model))) all.push_back({p.name, p.shape});
  return all;
}

std::vector<float> normal_values(int64_t count) {
  std::vector<float> values(static_cast<size_t>(count));
  parallel_for(count, 1 << 16, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) values[i] = rough_normal(philox(1, 0, static_cast<uint64_t>(i)));
  });
  return values;
}

// The gradients of a model in one bucket, and the values to which they are reset before every step.
struct GradientSet {
  std::vector<GradientTensor> tensors;
  GradientLayout layout;      // 16-byte aligned, as in the reducer
  int64_t elements = 0;       // without gaps
  std::vector<float> values;  // without gaps
  Buffer fresh, gradients;

  GradientSet(const std::string& model, const Stream& stream)
      : tensors(gradients_of(model)), layout(lay_out(tensors, 4, kOneBucket)) {
    for (const GradientTensor& t : tensors) elements += t.count();
    values = normal_values(elements);
    fresh = make_buffer<float>(stream.device(), layout.elements);
    gradients = make_buffer<float>(stream.device(), layout.elements);
    fill_zero(stream, fresh.data(), fresh.bytes());
    const float* from = values.data();
    for (size_t i = 0; i < tensors.size(); ++i) {
      const int64_t count = tensors[i].count();
      copy(stream, fresh.as<float>() + layout.offsets[i], from, static_cast<size_t>(count) * 4);
      from += count;
    }
    stream.synchronize();
  }
};

// The compression and decompression of a spec, on a transport without peers: the pipeline that the reducer
// runs for a bucket; for a lossy wire format two passes, because in a real run the encoded data are sent in
// between: gradient + residual -> wire, residual; wire -> gradient.
class CompressionPath {
 public:
  CompressionPath(const CompressionSpec& spec, const GradientSet& set, const Stream& stream)
      : spec_(spec),
        comm_(Communicator::create_single(stream.device())),
        step_(make_buffer<uint64_t>(stream.device(), 1)) {
    fill_zero(stream, step_.data(), step_.bytes());
    BucketContext context = bucket_context(*comm_, spec, stream, set.tensors, set.layout,
                                           set.layout.buckets.at(0), set.gradients.as<float>(), "the model");
    context.step = step_.as<const uint64_t>();
    context.schedule = ring(1);
    const bool errors = spec.policy.keeps_errors();
    if (spec.method != CompressionSpec::Method::wire || spec.wire->exact) {
      pipeline_.emplace(context);
      workspace_ = Buffer(stream.device(), pipeline_->workspace_bytes());
      pipeline_->bind(workspace_.data());
      extra_bytes = pipeline_->state_bytes() + static_cast<int64_t>(workspace_.bytes());
      if (spec.method == CompressionSpec::Method::powersgd) floor_bytes = spec.alternate ? 8 : 12;
      if (spec.method == CompressionSpec::Method::randk) floor_bytes = 8;
      if (floor_bytes > 0 && errors) floor_bytes += 8;
      return;
    }
    const int64_t count = set.layout.elements;
    residual_.emplace(context, errors);
    workspace_ = Buffer(stream.device(), residual_->workspace_bytes());
    residual_->bind(workspace_.data());
    wire_ = Buffer(stream.device(), static_cast<size_t>(spec.wire->bytes(count)));
    fill_zero(stream, wire_.data(), wire_.bytes());
    encode_ = {.own = set.gradients.as<const float>(),
               .residual = residual_->values(),
               .wire = wire_.data(),
               .count = count};
    encode_.rounding.mode = spec.rounding;
    decode_ = {.wire = wire_.data(), .out = set.gradients.as<float>(), .count = count};
    extra_bytes = residual_->bytes() + static_cast<int64_t>(workspace_.bytes() + wire_.bytes());
    floor_bytes = 8 + 2 * spec.wire->bytes_per_value() +
                  2 * static_cast<double>(residual_->bytes()) / static_cast<double>(count);
  }
  void run_step(const Stream& stream) {
    BucketPhases no_phases;
    if (pipeline_) return pipeline_->run(stream, spec_.policy.start + steps_++, no_phases);
    residual_->load(stream, no_phases);
    spec_.wire->reduce_encode(stream, encode_);
    spec_.wire->decode(stream, decode_);
    residual_->store(stream, no_phases);
  }

  int64_t extra_bytes = 0;
  double floor_bytes = 0;  // the minimum bytes per element

 private:
  const CompressionSpec spec_;
  std::unique_ptr<Communicator> comm_;
  Buffer step_, workspace_, wire_;
  std::optional<BucketPipeline> pipeline_;
  std::optional<Residual> residual_;
  ReduceEncode encode_;
  Decode decode_;
  int64_t steps_ = 0;
};

void write_all(int fd, std::string_view bytes) {
  if (const int error = write_fully(fd, bytes); error != 0)
    throw Error("write to the baseline: {}", std::strerror(error));
}

// PyTorch's hook in a child process. The two processes alternate: each process waits while the other
// process runs.
class PyTorchBaseline {
 public:
  // Starts `python` with bench/baselines/pytorch_hook.py. `data`: the tensors' values, one tensor after
  // another. Throws BadInput if the program does not exist or has no torch.
  PyTorchBaseline(const std::string& python, Device device, int threads,
                  const std::vector<GradientTensor>& tensors, std::span<const float> data)
      : python_(python) {
    // The child inherits the files. Their paths in the child are /proc/self/fd/<number>.
    const FileDescriptor file(memfd_create("gradients", 0));
    errors_ = FileDescriptor(memfd_create("errors", 0));
    if (!file || !errors_) throw Error("memfd_create: {}", std::strerror(errno));
    write_all(file.fd(), {reinterpret_cast<const char*>(data.data()), data.size_bytes()});
    nlohmann::json shapes = nlohmann::json::array();
    for (const GradientTensor& t : tensors) shapes.push_back(t.shape);
    nlohmann::json config = {{"device", device.is_host() ? "cpu" : device.name()},
                             {"threads", threads},
                             {"shapes", shapes},
                             {"data", fmt::format("/proc/self/fd/{}", file.fd())}};
    std::string text = config.dump(), count = fmt::to_string(threads);
    int in[2], out[2];
    if (pipe2(in, O_CLOEXEC) != 0 || pipe2(out, O_CLOEXEC) != 0) throw Error("pipe2 failed");
    to_ = FileDescriptor(in[1]);
    from_ = FileDescriptor(out[0]);
    FileDescriptor their_in(in[0]), their_out(out[1]);
    try {
      process_.emplace(
          std::vector<std::string>{python_, "-c", kPyTorchHookScript, text},
          ChildProcess::Descriptors{{in[0], 0}, {out[1], 1}, {errors_.fd(), 2}},
          ChildProcess::Variables{
              {"OMP_NUM_THREADS", count}, {"OPENBLAS_NUM_THREADS", count}, {"MKL_NUM_THREADS", count}});
    } catch (const ChildProcess::NotStarted& error) {
      throw BadInput("--baseline: {}", error.what());
    }
    their_in.close();
    their_out.close();
    nlohmann::json hello = read_answer();
    if (hello.contains("missing")) {
      throw BadInput(
          "--baseline: {}: {}; install python3-torch and python3-numpy, or give --python an "
          "interpreter that has them",
          python_, hello["missing"].get<std::string>());
    }
  }
  PyTorchBaseline(const PyTorchBaseline&) = delete;

  // Sets up PyTorch's hook for `spec` and warms it up. Returns its description, "" if PyTorch has none.
  std::string prepare(const CompressionSpec& spec) {
    if (spec.method == CompressionSpec::Method::powersgd && spec.wire == kFp32 && !spec.alternate) {
      return prepare(nlohmann::json{{"method", "powersgd"},
                                    {"rank", spec.rank},
                                    {"error_feedback", spec.policy.keeps_errors()},
                                    {"warm", spec.warm},
                                    {"min_ratio", spec.min_ratio}});
    }
    const bool bf16 = spec.method == CompressionSpec::Method::wire && spec.wire == kBf16 &&
                      spec.rounding == Rounding::nearest;
    return bf16 ? prepare(nlohmann::json{{"method", "bf16"}}) : "";
  }
  // The same for the options of pytorch_hook.py. Method qr: torch.linalg.qr instead of a hook, with one
  // batched call for all tensors of one shape.
  std::string prepare(const nlohmann::json& options) {
    write_all(to_.fd(), "prepare " + options.dump() + "\n");
    return read_answer().at("baseline").get<std::string>();
  }
  // Returns the milliseconds of one call of the hook on fresh data.
  double run_ms() {
    write_all(to_.fd(), "run\n");
    return read_answer().at("ms").get<double>();
  }

 private:
  nlohmann::json read_answer() {
    constexpr int kTimeoutMs = 300'000;
    size_t end;
    while ((end = received_.find('\n')) == std::string::npos) {
      pollfd readable{from_.fd(), POLLIN, 0};
      int ready = poll(&readable, 1, kTimeoutMs);
      if (ready < 0 && errno == EINTR) continue;
      if (ready == 0) throw Error("--baseline: {} did not answer for five minutes", python_);
      char chunk[4096];
      ssize_t n = read(from_.fd(), chunk, sizeof chunk);
      if (n <= 0) {
        const std::string why = last_line(errors_.fd());
        throw Error("--baseline: {} {}{}{}", python_, process_->wait().text, why.empty() ? "" : ": ", why);
      }
      received_.append(chunk, static_cast<size_t>(n));
    }
    nlohmann::json answer = nlohmann::json::parse(received_.substr(0, end));
    received_.erase(0, end + 1);
    return answer;
  }

  std::string python_;
  FileDescriptor to_, from_, errors_;
  std::optional<ChildProcess> process_;
  std::string received_;
};

// A command that measures work in turns with PyTorch.
class ComparedCommand : public Command {
 protected:
  using Command::Command;

  void add_model() {
    add("--model", model_, "A ViT of `gradwire train`, resnet18 or resnet50");
    add_device();
  }
  void add_baseline(const std::string& about) {
    if (access(python_.c_str(), X_OK) != 0) python_ = "python3";
    add("--baseline", has_baseline_, about);
    add("--python", python_, "A Python interpreter with torch");
    add_stop();
  }

  // Calls sample_us(step) with steps from -3, of which the negative ones warm up, until --stop ends the
  // measurement. Returns the fields of a row: ms, the baseline's, and those of the measurement; and the
  // baseline's statistics. `name`: the baseline's description; empty: none.
  template <typename SampleUs>
  std::pair<Json, Timing> measure_in_turns(SmClock& sm_clock, PyTorchBaseline* baseline,
                                           const std::string& name, SampleUs sample_us) const {
    Samples samples, baseline_samples;
    Clock::time_point start;
    auto elapsed_s = [&] { return std::chrono::duration<double>(Clock::now() - start).count(); };
    for (int step = -3; step <= 0 || !samples.done(stop_, elapsed_s()); ++step) {
      if (step == 0) start = Clock::now();
      const double us = sample_us(step);
      if (step < 0) continue;
      samples.add(us);
      sm_clock.sample();
      if (!name.empty()) baseline_samples.add(baseline->run_ms() * 1e3);
    }
    Timing timing = samples.timing();
    const Timing other = baseline_samples.timing();
    sm_clock.report(timing);
    Json row = {{"ms", timing.median_us / 1e3},
                {"baseline", nullptr},
                {"baseline_ms", nullptr},
                {"speedup", nullptr}};
    if (!name.empty()) {
      row["baseline"] = name;
      row["baseline_ms"] = other.median_us / 1e3;
      row["speedup"] = other.median_us / timing.median_us;
    }
    row.update(timing_json(timing));
    return {row, other};
  }

  std::string model_ = "vit_b_32", python_ = "/usr/bin/python3";
  bool has_baseline_ = false;
};

class Hook final : public ComparedCommand {
 public:
  explicit Hook(CLI::App& app)
      : ComparedCommand(
            app, "hook",
            "The cost of compression alone per step on a model's gradients, compared with PyTorch's hook") {
    add_model();
    add("--compression", texts_, "Compression spec; repeatable")->type_name("SPEC");
    add_baseline("Also run PyTorch's hook, alternating with Gradwire");
    add_threads("Host threads of both sides");
    add_files();
    columns_ = {{"spec", "spec", -28},
                {"n", "n", 5},
                {"ms", "ms", 9, 2},
                {"min", "min_us", 9, 2, "", 1e-3},
                {"noise", "noise", 7, 1, " %", 100},
                {"floor ms", "floor_ms", 9, 2},
                {"copy", "copy_gbps", 8, 1},
                {"extra", "extra", 10},
                {"base ms", "baseline_ms", 9, 2},
                {"min", "baseline_min", 9, 2},
                {"speedup", "speedup", 8, 2, "x"},
                {"baseline", "baseline", 0, -1, "", 1, "  "}};
  }

  int run() override {
    open();
    std::vector<CompressionSpec> specs;
    for (const std::string& text : texts_) specs.push_back(CompressionSpec::parse(text));
    gradients_of(model_);  // throws before the measurement if the model is unknown
    for (Device which : devices_for(device_)) {
      DeviceUnderTest device(which, StopRule::parse("50ms"));  // of the copies
      const GradientSet set(model_, device.stream);
      std::optional<PyTorchBaseline> baseline;
      if (has_baseline_) baseline.emplace(python_, which, host_threads(), set.tensors, set.values);
      fmt::print("{}: {} gradients in {} tensors, one bucket, on {}; medians and minima.\n\n", model_,
                 set.elements, set.tensors.size(), device.description);
      print_heading();
      for (const CompressionSpec& spec : specs) measure(spec, set, device, baseline ? &*baseline : nullptr);
      fmt::print("\n");
    }
    write_files();
    return 0;
  }

 private:
  void measure(const CompressionSpec& spec, const GradientSet& set, DeviceUnderTest& device,
               PyTorchBaseline* baseline) {
    // OpenMP's threads spin for a moment after work. Wait until the threads stop.
    constexpr std::chrono::milliseconds kPause{20};
    const Stream& stream = device.stream;
    CompressionPath path(spec, set, stream);
    std::vector<double> copies;  // before, after two steps, and after all steps
    auto copy_speed = [&] {      // of as many bytes as PowerSGD moves
      copies.push_back(device.time_with_copy([](const Stream&) {}, 24 * set.elements, true).second);
    };
    auto [measured, other] = measure_in_turns(
        device.sm_clock, baseline, baseline != nullptr ? baseline->prepare(spec) : "", [&](int step) {
          std::this_thread::sleep_for(kPause);
          if (step == 0 || step == 2) copy_speed();
          copy(stream, set.gradients.data(), set.fresh.data(), set.fresh.bytes());
          stream.synchronize();
          const auto start = Clock::now();
          path.run_step(stream);
          stream.synchronize();
          return std::chrono::duration<double, std::micro>(Clock::now() - start).count();
        });
    copy_speed();
    std::sort(copies.begin(), copies.end());
    const double copy_gbps = copies[copies.size() / 2];
    Json row = {{"spec", spec.to_string()},
                {"device", device.device.name()},
                {"model", model_},
                {"elements", set.elements},
                {"ms", nullptr},
                {"floor_ms", path.floor_bytes * static_cast<double>(set.elements) / copy_gbps / 1e6},
                {"copy_gbps", copy_gbps},
                {"extra_bytes", path.extra_bytes}};
    row.update(measured);
    add_row(row, {{"extra", size_text(path.extra_bytes)},
                  {"baseline_min", other.n > 0 ? Json(other.min_us / 1e3) : Json()}});
  }

  std::vector<std::string> texts_ = {"bf16", "fp8", "powersgd:rank=1", "powersgd:rank=4"};
};

// The P factors of every matrix that PowerSGD would compress at this rank, or equal matrices.
struct Factors {
  std::vector<MatrixDescriptor> matrices;
  std::vector<GradientTensor> shapes;
  int64_t p = 0, q = 0;  // elements of the factors

  void add(const std::string& name, int64_t rows, int64_t cols, int rank) {
    matrices.push_back({0, p, q, static_cast<int32_t>(rows), static_cast<int32_t>(cols), rank,
                        static_cast<int32_t>(matrices.size())});
    shapes.push_back({name, {rows, rank}});
    p += rows * rank;
    q += cols * rank;
  }
};

class OrthonormalizeCommand final : public ComparedCommand {
 public:
  explicit OrthonormalizeCommand(CLI::App& app)
      : ComparedCommand(app, "orthonormalize",
                        "All P factors of a model in one launch, compared with torch.linalg.qr") {
    add_model();
    add("--matrices", equal_, "COUNTxROWSxRANK: equal matrices instead of a model's");
    add("--rank", ranks_, "PowerSGD's rank; repeatable", CLI::Range(1, kMaxPowerSgdRank));
    add_baseline("Also run torch.linalg.qr, alternating with Gradwire");
    add_files();
    columns_ = {{"rank", "rank", 4},
                {"matrices", "matrices", 9},
                {"n", "n", 5},
                {"ms", "ms", 10, 3},
                {"noise", "noise", 7, 1, " %", 100},
                {"base ms", "baseline_ms", 10, 3},
                {"speedup", "speedup", 8, 1, "x"},
                {"baseline", "baseline", 0, -1, "", 1, "  "}};
  }

  int run() override {
    open();
    const std::vector<Factors> factors = all_factors();  // throws before the measurement on bad input
    const std::string source = equal_.empty() ? model_ : equal_;
    for (Device which : devices_for(device_)) {
      DeviceUnderTest device(which, StopRule{});
      fmt::print("The P factors of {} on {}; medians.\n\n", source, device.description);
      print_heading();
      for (const Factors& each : factors) measure(each, source, device);
      fmt::print("\n");
    }
    write_files();
    return 0;
  }

 private:
  std::vector<Factors> all_factors() const {
    if (!equal_.empty()) {
      int count = 0, rows = 0, rank = 0, end = 0;
      const int read = std::sscanf(equal_.c_str(), "%dx%dx%d%n", &count, &rows, &rank, &end);
      const bool whole = read == 3 && static_cast<size_t>(end) == equal_.size();
      if (!whole || count < 1 || rank < 1 || rank > std::min(rows, kMaxPowerSgdRank) || rows > (1 << 20)) {
        throw BadInput("--matrices '{}' is not COUNTxROWSxRANK, such as 24x1024x256, with RANK up to {}",
                       equal_, kMaxPowerSgdRank);
      }
      Factors factors;
      for (int i = 0; i < count; ++i) factors.add(fmt::format("matrix {}", i), rows, rank, rank);
      return {factors};
    }
    std::vector<Factors> all;
    for (int rank : ranks_) {
      CompressionSpec spec;
      spec.method = CompressionSpec::Method::powersgd;
      spec.rank = rank;
      Factors factors;
      for (const GradientTensor& t : gradients_of(model_)) {
        if (t.shape.size() < 2) continue;
        const int64_t rows = t.shape[0], cols = t.count() / rows;
        if (const int r = powersgd_rank(spec, rows, cols); r > 0) factors.add(t.name, rows, cols, r);
      }
      if (factors.matrices.empty()) {
        throw BadInput("--rank {}: PowerSGD would compress no tensor of {}; use a smaller rank", rank,
                       model_);
      }
      all.push_back(factors);
    }
    return all;
  }

  void measure(const Factors& factors, const std::string& source, DeviceUnderTest& device) {
    const Stream& stream = device.stream;
    const std::vector<float> values = normal_values(factors.p);
    const MatrixTable table(stream, factors.matrices);
    const Buffer in = make_buffer<float>(stream.device(), factors.p);
    const Buffer out = make_buffer<float>(stream.device(), factors.p);
    const Buffer flags = make_buffer<int32_t>(stream.device(), table.count());
    const Buffer scratch = make_buffer<double>(stream.device(), table.scratch_doubles());
    to_device(stream, in.as<float>(), std::span<const float>(values));
    const Orthonormalize args{.table = &table,
                              .which = Factor::p,
                              .in = in.as<const float>(),
                              .out = out.as<float>(),
                              .flags = flags.as<int32_t>(),
                              .scratch = scratch.as<double>()};
    std::optional<PyTorchBaseline> baseline;
    std::string name;
    if (has_baseline_) {
      baseline.emplace(python_, device.device, host_threads(), factors.shapes, values);
      name = baseline->prepare(nlohmann::json{{"method", "qr"}});
    }
    Json row = {{"model", source},
                {"device", device.device.name()},
                {"rank", table.max_rank()},
                {"matrices", table.count()}};
    row.update(measure_in_turns(device.sm_clock, baseline ? &*baseline : nullptr, name, [&](int) {
                 return device.time_once_us([&](const Stream& s) { orthonormalize(s, args); });
               }).first);
    add_row(row);
  }

  std::string equal_;  // the matrices instead of a model's
  std::vector<int> ranks_ = {4, 32};
};

}  // namespace

std::unique_ptr<Command> make_hook(CLI::App& app) {
  return std::make_unique<Hook>(app);
}

std::unique_ptr<Command> make_orthonormalize(CLI::App& app) {
  return std::make_unique<OrthonormalizeCommand>(app);
}

}  // namespace gradwire::bench
