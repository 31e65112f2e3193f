// Which gradients there are, where each lies in the flat buffer, and how that is cut into buckets.
#pragma once

#include <cstdint>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "collectives/codec/codec.h"
#include "collectives/communicator/communicator.h"
#include "collectives/spec/spec.h"
#include "runtime/shape.h"

namespace gradwire {

struct GradientTensor {
  std::string name;
  std::vector<int64_t> shape;

  int64_t count() const { return element_count(shape); }
};

// Rows and columns of a tensor as PowerSGD sees it: shape[0] x the rest; vectors and scalars are one column.
std::pair<int64_t, int64_t> matrix_of(const GradientTensor& tensor);

// Tensors [first_tensor, last_tensor), which are elements [begin, end) of the flat buffer.
struct BucketRange {
  int first_tensor = 0, last_tensor = 0;
  int64_t begin = 0, end = 0;

  int64_t elements() const { return end - begin; }
  int tensors() const { return last_tensor - first_tensor; }
};

struct GradientLayout {
  std::vector<int64_t> offsets;  // of each tensor, in elements
  int64_t elements = 0;          // gaps included
  std::vector<BucketRange> buckets;
};

inline constexpr int64_t kOneBucket = std::numeric_limits<int64_t>::max();  // as bucket_bytes
// Tensor after tensor, each at a multiple of `alignment` elements. A bucket is closed by the tensor that
// fills it to bucket_bytes; tensors are never split. Throws BadInput that names a tensor with a negative
// extent.
GradientLayout lay_out(const std::vector<GradientTensor>& tensors, int64_t alignment, int64_t bucket_bytes);

// What the codecs of a reducer have in common.
struct CodecSetup {
  Communicator& comm;
  const CompressionSpec& spec;
  Stream stream;                   // for set-up work
  const uint64_t* step = nullptr;  // steps done so far, in device memory
  float* gradients = nullptr;      // the flat buffer; null: BucketContext::gradients
  bool average = true;
  uint64_t seed = 0;
};

// What make_codec() wants to know of a bucket. Left to the caller: schedule or planner, transfers and slices.
BucketContext bucket_context(const CodecSetup& setup, const std::vector<GradientTensor>& tensors,
                             const GradientLayout& layout, const BucketRange& bucket, std::string name);

}  // namespace gradwire
