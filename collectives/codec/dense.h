// The parts of a bucket that are averaged in FP32, or in BF16 if its gradients are BF16, apart from the
// tensors that the codec compresses:
//   - the tensors in a spec's `dense=`. Vectors and small tensors hold a few thousandths of a model, but much
//     of the error of a coarse format.
//   - the shorter part of a block that two tensors share, if a NaN in one would delay the other
//     (shared_ends).
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "collectives/codec/codec.h"
#include "kernels/powersgd/pack.h"

namespace gradwire {

// Dense under `auto`: matrices of fewer values than this,
inline constexpr int64_t kSmallMatrix = 1024;
// and vectors (one row or column) of at most this many. A longer one is probably a flattened model, not a
// bias.
inline constexpr int64_t kLongestVector = 1 << 16;

bool is_dense(const CompressionSpec& spec, const BucketTensor& tensor);

// Throws BadInput if a name in the spec's dense= matches none of `tensors`. For callers with all of a model's
// tensors; a reducer of one bucket does not have them.
void check_dense_names(const CompressionSpec& spec, const std::vector<std::string>& tensors);

// Returns the alignment, in elements, of tensors packed for a wire format; a multiple of `least`. Tensors
// begin at a block if a non-finite value would delay the finite values of its block.
int64_t packing_unit(Wire wire, int64_t least);
// Returns the positions of a bucket's tensors packed one after another, each at a multiple of `unit`
// elements. Omits empty tensors.
std::vector<Segment> pack_tensors(const std::vector<BucketTensor>& tensors, int64_t unit);
// Returns the number of elements occupied by such segments.
int64_t packed_elements(const std::vector<Segment>& segments, int64_t unit);

// Returns the parts of tensors that must leave the bucket so that no block of its wire format holds values of
// two tensors: all parts of such a block but the longest. Empty if a non-finite value does not delay other
// values (WireFormat::masks).
std::vector<ElementSpan> shared_ends(const BucketContext& context);

// Returns the codec of a bucket with dense parts; the compressing codec if there are none.
std::unique_ptr<Codec> make_dense_codec(const BucketContext& context);

}  // namespace gradwire
