// The dense parts of a bucket: averaged in FP32, or in BF16 if the bucket's gradients are BF16, apart from
// the parts that the codec compresses:
//   - the tensors in a spec's `dense=`. Vectors and small tensors hold a few thousandths of a model, but much
//     of the error of a coarse format.
//   - the shorter part of a block that two tensors share, if a NaN in one would delay the other
//     (shared_ends).
#pragma once

#include <string>
#include <vector>

#include "collectives/codec/codec.h"
#include "kernels/powersgd/powersgd.h"

namespace gradwire {

// dense=auto: matrices of fewer elements are dense.
inline constexpr int64_t kSmallMatrix = 1024;
// dense=auto: vectors (one row or column) of at most this many elements are dense. A longer vector is
// probably a flattened model, not a bias.
inline constexpr int64_t kLongestVector = 1 << 16;

// Returns whether dense=auto means a tensor of this shape.
bool is_small(int64_t rows, int64_t cols);
// Returns whether the spec's dense= applies to the tensor.
bool is_dense(const CompressionSpec& spec, const BucketTensor& tensor);

// Throws BadInput if a name in the spec's dense= matches none of `tensors`: the names of all tensors of a
// model, not of one bucket.
void check_dense_names(const CompressionSpec& spec, const std::vector<std::string>& tensors);

// Returns the alignment, in elements, of tensors packed for a wire format; a multiple of `least`. Tensors
// begin at a block if a non-finite value would delay the finite values of its block.
int64_t packing_unit(Wire wire, int64_t least);
// Returns the positions of a bucket's tensors, packed one after another, each tensor at a multiple of `unit`
// elements. Omits empty tensors.
std::vector<Segment> pack_tensors(const std::vector<BucketTensor>& tensors, int64_t unit);
// Returns the number of elements that the segments of pack_tensors() occupy.
int64_t packed_elements(const std::vector<Segment>& segments, int64_t unit);

// Returns the parts of tensors that must leave the bucket so that no block of its wire format holds values of
// two tensors. In a block that tensors share, only the longest part stays. Empty if a non-finite value does
// not delay other values (WireFormat::masks).
std::vector<ElementSpan> shared_ends(const BucketContext& context);

}  // namespace gradwire
