#include "trainer/measure/encode_error.h"

#include <chrono>
#include <cmath>
#include <exception>
#include <span>

#include "collectives/communicator/local_ranks.h"

namespace gradwire {
namespace {

constexpr int64_t kBucketBytes = int64_t{25} << 20, kAlignment = 4;  // the alignment of packed_layout()

// The gradients of a bucket, and their tensors.
struct Sample {
  std::vector<GradientTensor> tensors;
  std::span<const float> values;
};

std::vector<Sample> samples_of(const std::vector<GradientTensor>& tensors,
                               const std::vector<float>& gradients) {
  std::vector<Sample> samples;
  for (const BucketRange& range : lay_out(tensors, kAlignment, kBucketBytes).buckets) {
    samples.push_back({{tensors.begin() + range.first_tensor, tensors.begin() + range.last_tensor},
                       {gradients.data() + range.begin, static_cast<size_t>(range.elements())}});
  }
  return samples;
}

// Sums of squared relative errors, weighted by elements.
struct ErrorSum {
  double weighted = 0, elements = 0;

  void add(std::span<const float> exact, const float* mean) {
    double change = 0, norm = 0;
    for (size_t i = 0; i < exact.size(); ++i) {
      const double value = exact[i], difference = mean[i] - value;
      norm += value * value;
      change += difference * difference;
    }
    if (norm == 0) return;
    weighted += static_cast<double>(exact.size()) * change / norm;
    elements += static_cast<double>(exact.size());
  }
  double root() const { return elements == 0 ? 0 : std::sqrt(weighted / elements); }
};

// Averages a sample of which all ranks have the same values, and adds the errors of its tensors.
void add_errors(Communicator& comm, const CompressionSpec& spec, const Sample& sample, ErrorSum& errors) {
  const Stream stream = Stream::create(comm.device(), "error");
  Reducer reducer(comm, spec, sample.tensors,
                  {.bucket_bytes = kOneBucket, .timing = false, .alignment = kAlignment});
  to_device<float>(stream, reducer.gradients().as<float>(), sample.values);
  for (int i = 0; i < reducer.tensors(); ++i) reducer.ready(i, stream);
  reducer.wait(stream);
  const std::vector<float> mean =
      to_host(stream, reducer.gradients().as<const float>(), static_cast<int64_t>(sample.values.size()));
  comm.check();
  for (int i = 0; i < reducer.tensors(); ++i) {
    const auto begin = static_cast<size_t>(reducer.offset(i));
    const auto count = static_cast<size_t>(sample.tensors[static_cast<size_t>(i)].count());
    errors.add(sample.values.subspan(begin, count), mean.data() + begin);
  }
}

// Returns the spec for a pair of threads, which has neither nodes nor a certain transport.
CompressionSpec spec_of_pair(const std::string& text) {
  CompressionSpec spec = CompressionSpec::parse(text);
  spec.schedule = ScheduleKind::automatic;
  spec.peer_access = PeerAccessMode::off;
  spec.fp32_intra_node = false;
  return spec;
}

}  // namespace

std::vector<double> encode_errors(Device device, const std::vector<GradientTensor>& tensors,
                                  const std::vector<float>& gradients,
                                  const std::vector<std::string>& specs) {
  const std::vector<Sample> samples = samples_of(tensors, gradients);
  std::vector<double> errors;
  const auto pair = create_local_ranks({device, device}, std::chrono::seconds(60), {});
  run_local_ranks(pair, [&](Communicator& comm) {
    for (const std::string& text : specs) {
      const CompressionSpec spec = spec_of_pair(text);
      ErrorSum sum;
      for (const Sample& sample : samples) add_errors(comm, spec, sample, sum);
      if (comm.rank() == 0) errors.push_back(sum.root());
    }
  });
  return errors;
}

std::optional<double> try_encode_error(Device device, const std::vector<GradientTensor>& tensors,
                                       const std::vector<float>& gradients, const std::string& spec) {
  try {
    return encode_errors(device, tensors, gradients, {spec})[0];
  } catch (const std::exception&) {
    return std::nullopt;
  }
}

}  // namespace gradwire
