// Parts of the low-rank codec: which tensors it compresses, their places in the packed factors, and its
// uncompressed first steps.
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
  std::vector<int> tensors;    // tensor of each matrix
  std::vector<Segment> dense;  // packed from 0 on
  int64_t p_elements = 0, q_elements = 0, dense_elements = 0;

  explicit PowerSgdPlan(const BucketContext& context);
  // Returns the dense pieces, packed after `elements` elements of a factor.
  std::vector<Segment> dense_after(int64_t elements) const;
};

// Returns the plain FP32 allreduce of the steps before spec.start; null if spec.start is 0.
std::unique_ptr<Program> make_plain_start(const BucketContext& context);

// Draws random orthonormal columns, the same on every rank. Orthonormalizing zeros re-seeds every column.
void draw_basis(const Stream& stream, const MatrixTable& matrices, Factor which, const Buffer& basis,
                int32_t* flags, uint64_t seed, const uint64_t* step);

// Adds the pending parts of all matrices that overlap elements [begin, end) to the residual. Then sets
// `zeroed`, one of the pending factors, to zero for these matrices, so that nothing remains pending.
void settle(const Stream& stream, const MatrixTable& matrices, float* residual, const PendingFactors& pending,
            Factor zeroed, int64_t begin, int64_t end);

}  // namespace gradwire
