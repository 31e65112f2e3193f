// `dense=` of a spec: tensors that are averaged in FP32 beside those that the codec compresses. Vectors and
// small tensors hold a few thousandths of a model, and much of what a coarse format does to it.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "collectives/codec/codec.h"
#include "kernels/powersgd/pack.h"

namespace gradwire {

// Under `auto` these are dense: matrices of fewer values than this,
inline constexpr int64_t kSmallMatrix = 1024;
// and vectors (one row or column) of at most this many. A longer one is not a bias: somebody flattened a model.
inline constexpr int64_t kLongestVector = 1 << 16;

bool is_dense(const CompressionSpec& spec, const BucketTensor& tensor);

// Throws BadInput if a name in the spec's dense= matches none of these names: for callers that know all of a
// model's tensors, as a reducer of one bucket does not.
void check_dense_names(const CompressionSpec& spec, const std::vector<std::string>& tensors);

// Where tensors of a bucket go when they are packed behind each other from `first` on, each at a multiple of 4
// elements for vectorized kernels. Empty tensors are left out.
std::vector<Segment> pack_tensors(const std::vector<BucketTensor>& tensors, int64_t first);
// Elements that such segments take from `first` on.
int64_t packed_elements(const std::vector<Segment>& segments, int64_t first);

// The codec of a bucket whose spec names dense tensors; the plain one where it has none.
std::unique_ptr<Codec> make_dense_codec(const BucketContext& context);

}  // namespace gradwire
