#include "collectives/reducer/buckets.h"

#include <algorithm>

#include "runtime/util/error.h"

namespace gradwire {

std::pair<int64_t, int64_t> matrix_of(const GradientTensor& tensor) {
  const int64_t count = tensor.count();
  if (count == 0) return {0, 0};
  const int64_t rows = tensor.shape.size() < 2 ? count : tensor.shape[0];
  return {rows, count / rows};
}

GradientLayout lay_out(const std::vector<GradientTensor>& tensors, int64_t alignment, int64_t bucket_bytes) {
  if (alignment < 1)
    throw BadInput("ReducerOptions::alignment is {}; it must be at least 1 element", alignment);
  GradientLayout layout;
  for (int i = 0; i < static_cast<int>(tensors.size()); ++i) {
    const GradientTensor& tensor = tensors[i];
    if (std::any_of(tensor.shape.begin(), tensor.shape.end(), [](int64_t extent) { return extent < 0; })) {
      throw BadInput("gradient '{}' has a negative extent", tensor.name);
    }
    if (layout.buckets.empty() || layout.buckets.back().elements() * 4 >= bucket_bytes) {
      layout.buckets.push_back({.first_tensor = i, .begin = layout.elements});
    }
    layout.offsets.push_back(layout.elements);
    layout.elements += (tensor.count() + alignment - 1) / alignment * alignment;
    layout.buckets.back().last_tensor = i + 1;
    layout.buckets.back().end = layout.elements;
  }
  return layout;
}

BucketContext bucket_context(Communicator& comm, const CompressionSpec& spec, const Stream& stream,
                             const std::vector<GradientTensor>& tensors, const GradientLayout& layout,
                             const BucketRange& bucket, float* gradients, std::string name) {
  BucketContext context;
  context.transport = &comm.transport();
  context.spec = spec;
  context.stream = stream;
  for (int i = bucket.first_tensor; i < bucket.last_tensor; ++i) {
    const auto [rows, cols] = matrix_of(tensors[i]);
    context.tensors.push_back({tensors[i].name, rows, cols, layout.offsets[i] - bucket.begin, i});
  }
  context.gradients = gradients == nullptr ? nullptr : gradients + bucket.begin;
  context.elements = bucket.elements();
  context.first_element = bucket.begin;
  context.scale = 1.0f / static_cast<float>(comm.world());
  context.rounding_seed = static_cast<uint64_t>(comm.rank()) + 1;
  context.name = std::move(name);
  return context;
}

}  // namespace gradwire
