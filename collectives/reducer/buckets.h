// The gradients, their layout in the flat buffer, and its division into buckets.
#pragma once

#include <cstdint>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "collectives/codec/codec.h"
#include "collectives/communicator/communicator.h"
#include "collectives/spec/spec.h"
#include "runtime/device/device.h"
#include "runtime/util/parse.h"

namespace gradwire {

struct GradientTensor {
  std::string name;
  std::vector<int64_t> shape;
  // Type of the elements: f32, bf16 or f16. Gradients in bf16 and f16 are widened when the bucket is full,
  // and rounded to nearest when written back.
  DType dtype = DType::f32;

  int64_t count() const { return element_count(shape); }
};

// Returns the rows and columns of a tensor for PowerSGD: shape[0], and the product of the other extents.
// Vectors and scalars have one column.
std::pair<int64_t, int64_t> matrix_of(const GradientTensor& tensor);

// Tensors [first_tensor, last_tensor), in elements [begin, end) of the flat buffer.
struct BucketRange {
  int first_tensor = 0, last_tensor = 0;
  int64_t begin = 0, end = 0;

  int64_t elements() const { return end - begin; }
  int tensors() const { return last_tensor - first_tensor; }
};

struct GradientLayout {
  std::vector<int64_t> offsets;  // offset of each tensor, in elements
  int64_t elements = 0;          // number of elements, including gaps
  std::vector<BucketRange> buckets;
};

// The value of bucket_bytes that puts all tensors in one bucket.
inline constexpr int64_t kOneBucket = std::numeric_limits<int64_t>::max();
// Places tensors one after another, each tensor at a multiple of `alignment` elements. The tensor that fills
// a bucket to bucket_bytes closes the bucket; tensors are never split. Throws BadInput for a tensor with a
// negative extent.
GradientLayout lay_out(const std::vector<GradientTensor>& tensors, int64_t alignment, int64_t bucket_bytes);

// Returns the context of a bucket of a flat buffer at `gradients` (null: see BucketContext::gradients), for
// the mean over the ranks. The caller adds the step, schedule or planner, transfers and slices.
BucketContext bucket_context(Communicator& comm, const CompressionSpec& spec, const Stream& stream,
                             const std::vector<GradientTensor>& tensors, const GradientLayout& layout,
                             const BucketRange& bucket, float* gradients, std::string name);

}  // namespace gradwire
