#include "collectives/reducer/choose.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <limits>

#include "collectives/reducer/reducer.h"
#include "collectives/reducer/report.h"
#include "kernels/math/small_float.h"
#include "runtime/util/error.h"

namespace gradwire {
namespace {

constexpr int kRepetitions = 3;

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
    for (int64_t offset : offsets_) addresses.push_back(memory_.as<std::byte>() + offset);
  }

  std::vector<void*> addresses;
  void copy_from(const Stream& stream, const std::vector<void*>& gradients) {
    for (size_t i = 0; i < tensors_.size(); ++i) {
      copy(stream, addresses[i], gradients[i], static_cast<size_t>(bytes(tensors_[i])));
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
  Buffer memory_;
};

ReducerOptions reducer_options(const Stream& stream, int64_t bucket_bytes, uint64_t seed) {
  return {.name = "choice",
          .bucket_bytes = bucket_bytes,
          .timing = false,
          .seed = seed,
          .alignment = 1,
          .own_gradients = false,
          .stream = stream};
}

// Averages the tensors at the addresses that the reducer has adopted. Returns the milliseconds that this
// took.
double average(Communicator& comm, Reducer& reducer, const Stream& caller) {
  const auto begin = std::chrono::steady_clock::now();
  for (int i = 0; i < reducer.tensors(); ++i) reducer.ready(i, caller);
  reducer.wait(caller);
  caller.synchronize();
  comm.check();  // a CUDA stream carries no errors
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begin).count();
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

size_t choose_spec(Communicator& comm, const Stream& stream, const Stream& caller,
                   const std::vector<CompressionSpec>& specs, const std::vector<GradientTensor>& tensors,
                   const std::vector<void*>& gradients, const ChooseOptions& options,
                   std::vector<SpecTrial>& trials) {
  trials.assign(specs.size(), {});
  if (comm.world() == 1) return 0;
  const ReducerOptions how = reducer_options(stream, options.bucket_bytes, options.seed);
  Copies mean(comm.device(), tensors), result(comm.device(), tensors);
  mean.copy_from(caller, gradients);
  std::vector<BucketRange> buckets;
  {
    Reducer exact(comm, {}, tensors, how);
    exact.adopt(mean.addresses);
    average(comm, exact, caller);
    buckets = exact.ranges();
  }
  const std::vector<std::byte> wanted = mean.on_host(caller);
  RelativeError own;  // NaN if the mean is not finite
  for (size_t t = 0; t < tensors.size(); ++t) {
    own.add(mean.reader(wanted, t), mean.reader(wanted, t), tensors[t].count());
  }
  require(!own.empty(),
          "the mean of the gradients is zero, so no error can be measured; call gw_choose again in a later "
          "step");
  require(std::isfinite(own.root()),
          "the mean of the gradients is not finite; call gw_choose again in a later step");
  std::vector<float> numbers{static_cast<float>(options.compute_ms), static_cast<float>(options.backward_ms)};
  for (const CompressionSpec& spec : specs) {
    Reducer reducer(comm, spec, tensors, how);
    reducer.adopt(result.addresses);
    RelativeError error;
    double ms = std::numeric_limits<double>::infinity();
    for (int repetition = 0; repetition < kRepetitions; ++repetition) {
      result.copy_from(caller, mean.addresses);
      caller.synchronize();
      const double took = average(comm, reducer, caller);
      if (repetition > 0) ms = std::min(ms, took);  // the first waits for the other ranks
      if (repetition > 0) continue;
      const std::vector<std::byte> got = result.on_host(caller);
      for (size_t t = 0; t < tensors.size(); ++t) {
        error.add(mean.reader(wanted, t), result.reader(got, t), tensors[t].count());
      }
    }
    numbers.insert(numbers.end(), {static_cast<float>(ms), static_cast<float>(error.root())});
  }
  {  // the numbers' means over the ranks
    Buffer memory = make_buffer<float>(comm.device(), std::ssize(numbers));
    to_device<float>(caller, memory.as<float>(), numbers);
    Reducer reducer(comm, {}, {{"measurements", {std::ssize(numbers)}}},
                    reducer_options(stream, ChooseOptions{}.bucket_bytes, 0));
    reducer.adopt(std::vector<void*>{memory.data()});
    average(comm, reducer, caller);
    numbers = to_host(caller, memory.as<const float>(), std::ssize(numbers));
  }
  std::vector<double> errors, steps;
  for (size_t i = 0; i < specs.size(); ++i) {
    const double ms = numbers[2 + 2 * i];
    trials[i] = {numbers[3 + 2 * i], ms, exposed_ms(buckets, ms, numbers[1])};
    errors.push_back(trials[i].error);
    steps.push_back(numbers[0] + trials[i].exposed_ms);
  }
  return choose_candidate(errors, steps, options.error);
}

}  // namespace gradwire
