#include "trainer/measure/encode_error.h"

#include <chrono>
#include <exception>
#include <span>

#include "collectives/communicator/communicator.h"
#include "collectives/reducer/report.h"

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

// Averages a sample of which all ranks have the same values, and adds the errors of its tensors.
void add_errors(Communicator& comm, const CompressionSpec& spec, const Sample& sample,
                RelativeError& errors) {
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
    const int64_t count = sample.tensors[static_cast<size_t>(i)].count();
    const auto from = [begin](const float* values) {
      return [at = values + begin](int64_t element) { return at[element]; };
    };
    errors.add(from(sample.values.data()), from(mean.data()), count);
  }
}

// Returns the spec for a pair of threads, which has no nodes.
CompressionSpec spec_of_pair(const std::string& text) {
  CompressionSpec spec = CompressionSpec::parse(text);
  spec.schedule = ScheduleKind::automatic;
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
      RelativeError sum;
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
