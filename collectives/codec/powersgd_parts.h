// Common parts of the two `powersgd` codecs: which tensors are compressed, their places in the packed
// factors, and their allreduces.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "collectives/codec/codec.h"
#include "kernels/powersgd/orthonormalize.h"
#include "kernels/powersgd/pack.h"
#include "kernels/powersgd/powersgd.h"

namespace gradwire {

struct PowerSgdPlan {
  std::vector<MatrixDescriptor> matrices;
  std::vector<int> tensors;    // of the matrices
  std::vector<Segment> dense;  // packed from 0 on
  int64_t p_elements = 0, q_elements = 0, dense_elements = 0;

  explicit PowerSgdPlan(const BucketContext& context);
  // Returns the dense pieces, packed after `elements` elements of a factor.
  std::vector<Segment> dense_after(int64_t elements) const;
};

// Returns the options of the allreduce of `part` of the bucket, such as "Q". `first_element` distinguishes
// its stochastic rounding from that of other parts.
Program::Options powersgd_options(const BucketContext& context, const std::string& part,
                                  uint64_t first_element, int64_t slice_bytes);

// Returns the plain FP32 allreduce of the steps before spec.start; null if spec.start is 0.
std::unique_ptr<Program> make_plain_start(const BucketContext& context);

// Draws random orthonormal columns, the same on every rank: orthonormalizing zeros re-seeds every column.
void draw_basis(const Stream& stream, const MatrixTable& matrices, Factor which, const Buffer& basis,
                int32_t* flags, uint64_t seed, const uint64_t* step);

// Brings the matrices among elements [begin, end) of the residual up to date: adds their pending parts, then
// sets `zeroed`, one of the pending factors, to zero there, so that nothing remains pending.
void settle(const Stream& stream, const MatrixTable& matrices, float* residual, const PendingFactors& pending,
            Factor zeroed, int64_t begin, int64_t end);

// The codec of `powersgd` with alternate=on.
std::unique_ptr<Codec> make_acp_codec(const BucketContext& context);

}  // namespace gradwire
