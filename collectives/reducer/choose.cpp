#include "collectives/reducer/choose.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>

#include "collectives/reducer/reducer.h"
#include "collectives/reducer/report.h"
#include "kernels/math/small_float.h"

namespace gradwire {
namespace {

constexpr int kRepetitions = 3;

double milliseconds(const std::function<void()>& work) {
  const auto begin = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begin).count();
}

// Gradients one after another in device memory.
class Copies {
 public:
  Copies(Device device, const std::vector<GradientTensor>& tensors) : tensors_(tensors) {
    constexpr int64_t kAlignment = 4;
    int64_t end = 0;
    for (const GradientTensor& tensor : tensors) {
      offsets_.push_back(end);
      end += (bytes(tensor) + kAlignment - 1) / kAlignment * kAlignment;
    }
    memory_ = make_buffer<std::byte>(device, end);
    for (int64_t offset : offsets_) addresses_.push_back(memory_.as<std::byte>() + offset);
  }

  const std::vector<void*>& addresses() const { return addresses_; }
  void copy_from(const Stream& stream, const std::vector<void*>& gradients) {
    for (size_t i = 0; i < tensors_.size(); ++i) {
      copy(stream, addresses_[i], gradients[i], static_cast<size_t>(bytes(tensors_[i])));
    }
  }
  std::vector<std::byte> on_host(const Stream& stream) const {
    return to_host(stream, memory_.as<const std::byte>(), static_cast<int64_t>(memory_.bytes()));
  }
  // Returns a function from an index to an element of tensor `i` in on_host().
  auto reader(const std::vector<std::byte>& host, size_t i) const {
    const DType type = tensors_[i].dtype;
    return [type, at = host.data() + offsets_[i]](int64_t element) -> double {
      if (type == DType::f32) {
        float value = 0;
        std::memcpy(&value, at + 4 * element, sizeof value);
        return value;
      }
      uint16_t bits = 0;
      std::memcpy(&bits, at + 2 * element, sizeof bits);
      return type == DType::bf16 ? bf16_to_float(bits) : fp16_to_float(bits);
    };
  }

 private:
  static int64_t bytes(const GradientTensor& tensor) { return tensor.count() * bytes_of(tensor.dtype); }

  const std::vector<GradientTensor>& tensors_;
  std::vector<int64_t> offsets_;
  std::vector<void*> addresses_;
  Buffer memory_;
};

// Averages the tensors at these addresses.
class Averager {
 public:
  Averager(Communicator& comm, const Stream& stream, const CompressionSpec& spec,
           const std::vector<GradientTensor>& tensors, const std::vector<void*>& addresses,
           const ChooseOptions& options)
      : comm_(comm),
        reducer_(comm, spec, tensors,
                 {.name = "choice",
                  .bucket_bytes = options.bucket_bytes,
                  .timing = false,
                  .seed = options.seed,
                  .alignment = 1,
                  .own_gradients = false,
                  .stream = stream}) {
    reducer_.adopt(addresses);
  }
  void run(const Stream& caller) {
    for (int i = 0; i < reducer_.tensors(); ++i) reducer_.ready(i, caller);
    reducer_.wait(caller);
    caller.synchronize();
    comm_.check();  // a CUDA stream carries no errors
  }
  const std::vector<BucketRange>& buckets() const { return reducer_.ranges(); }

 private:
  Communicator& comm_;
  Reducer reducer_;
};

// Returns the numbers' means over the ranks.
std::vector<float> averaged(Communicator& comm, const Stream& stream, const Stream& caller,
                            const std::vector<float>& numbers) {
  const std::vector<GradientTensor> tensor{{"measurements", {static_cast<int64_t>(numbers.size())}}};
  Buffer memory = make_buffer<float>(comm.device(), static_cast<int64_t>(numbers.size()));
  to_device<float>(caller, memory.as<float>(), numbers);
  Averager averager(comm, stream, {}, tensor, {memory.data()}, {});
  averager.run(caller);
  return to_host(caller, memory.as<const float>(), static_cast<int64_t>(numbers.size()));
}

// Returns the time of an allreduce that backward does not hide. Buckets take time in proportion to their
// size.
double exposed_ms(const std::vector<BucketRange>& buckets, double communicate_ms, double backward_ms) {
  double elements = 0, done = 0, end = 0;
  for (const BucketRange& bucket : buckets) elements += static_cast<double>(bucket.elements());
  for (const BucketRange& bucket : buckets) {
    const double share = static_cast<double>(bucket.elements()) / elements;
    done += share;
    end = std::max(end, backward_ms * done) + communicate_ms * share;
  }
  return std::max(0.0, end - backward_ms);
}

}  // namespace

size_t choose_candidate(const std::vector<double>& errors, const std::vector<double>& step_ms, double limit,
                        double tie) {
  std::vector<size_t> allowed;
  for (size_t i = 0; i < errors.size(); ++i) {
    if (i == 0 || errors[i] <= limit || std::isinf(limit)) allowed.push_back(i);  // not NaN within a limit
  }
  const auto step = [&](size_t i) { return step_ms[i]; };
  const double shortest = step(*std::ranges::min_element(allowed, {}, step));
  std::erase_if(allowed, [&](size_t i) { return step(i) > tie * shortest; });
  return *std::ranges::min_element(allowed, {}, [&](size_t i) {
    return std::isnan(errors[i]) ? std::numeric_limits<double>::infinity() : errors[i];
  });
}

std::string choice_obstacle(const CompressionSpec& spec) {
  if (spec.policy.start > 0 || spec.policy.ramp > 0)
    return "the error is that of the first step, which start= and ramp= compress less";
  if (spec.policy.momentum > 0)
    return "momentum= replaces the optimizer's momentum, which specs without it would lack";
  if (spec.method == CompressionSpec::Method::dion) return "Dion is an optimizer, not a mean of gradients";
  return "";
}

SpecChoice choose_spec(Communicator& comm, const Stream& stream, const Stream& caller,
                       const std::vector<CompressionSpec>& specs, const std::vector<GradientTensor>& tensors,
                       const std::vector<void*>& gradients, const ChooseOptions& options) {
  SpecChoice out;
  out.trials.resize(specs.size());
  if (comm.world() == 1) return out;
  Copies mean(comm.device(), tensors), result(comm.device(), tensors);
  mean.copy_from(caller, gradients);
  std::vector<BucketRange> buckets;
  {
    Averager exact(comm, stream, {}, tensors, mean.addresses(), options);
    exact.run(caller);
    buckets = exact.buckets();
  }
  const std::vector<std::byte> wanted = mean.on_host(caller);
  RelativeError own;  // NaN if the mean is not finite
  for (size_t t = 0; t < tensors.size(); ++t) {
    own.add(mean.reader(wanted, t), mean.reader(wanted, t), tensors[t].count());
  }
  if (own.empty() || !std::isfinite(own.root())) {
    out.problem = own.empty() ? SpecChoice::Problem::zero : SpecChoice::Problem::not_finite;
    return out;
  }
  const auto compute = static_cast<float>(options.compute_ms),
             backward = static_cast<float>(options.backward_ms);
  std::vector<float> numbers{compute, backward};
  for (const CompressionSpec& spec : specs) {
    Averager averager(comm, stream, spec, tensors, result.addresses(), options);
    RelativeError error;
    double ms = std::numeric_limits<double>::infinity();
    for (int repetition = 0; repetition < kRepetitions; ++repetition) {
      result.copy_from(caller, mean.addresses());
      caller.synchronize();
      const double took = milliseconds([&] { averager.run(caller); });
      if (repetition > 0) ms = std::min(ms, took);  // the first waits for the other ranks
      if (repetition > 0) continue;
      const std::vector<std::byte> got = result.on_host(caller);
      for (size_t t = 0; t < tensors.size(); ++t) {
        error.add(mean.reader(wanted, t), result.reader(got, t), tensors[t].count());
      }
    }
    numbers.push_back(static_cast<float>(ms));
    numbers.push_back(static_cast<float>(error.root()));
  }
  numbers = averaged(comm, stream, caller, numbers);
  std::vector<double> errors, steps;
  for (size_t i = 0; i < specs.size(); ++i) {
    const double ms = numbers[2 + 2 * i];
    out.trials[i] = {numbers[3 + 2 * i], ms, exposed_ms(buckets, ms, numbers[1])};
    errors.push_back(out.trials[i].error);
    steps.push_back(numbers[0] + out.trials[i].exposed_ms);
  }
  out.chosen = choose_candidate(errors, steps, options.error);
  return out;
}

}  // namespace gradwire
