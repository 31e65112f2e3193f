// Random-k sparsification (Stich et al., "Sparsified SGD with Memory", NeurIPS 2018): of each tensor, k
// coordinates, which all ranks draw identically from (seed, step, tensor), so that the values can be summed
// without sending their positions. kernels/math/random.h describes the drawing.
//
//   randk_gather   S = grad + residual. values = S at the chosen coordinates, where the residual becomes 0;
//                  elsewhere the residual becomes S. grad becomes 0                           16 B/element
//   -- the values are summed over ranks --
//   randk_scatter  grad = values at the chosen coordinates
//
// Without a residual, other elements are dropped: 8 B/element. The k values add 12 bytes each, plus a memory
// sector for each array that they are read from or written to out of order. Limit: memory bandwidth.
// Alignment: any (16 bytes are fast). Deterministic; the same bits on every device.
//
// Non-finite gradients: a chosen element is sent unchanged. An element that is not chosen makes its stratum's
// value NaN, so that the user sees a NaN in the same tensor on every rank; its old residual is unchanged. The
// residual never becomes non-finite: it is clamped, or 0 where the value was sent.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/math/random.h"
#include "kernels/op.h"

namespace gradwire {

struct RandKTensor {
  int64_t offset = 0;  // position of the first element in the gradient
  int64_t packed = 0;  // position of the first value among the values
  int64_t count = 0;   // number of elements
  int64_t k = 0;       // number of values
  int32_t index = 0;   // identifies the tensor in random draws: the same on every rank
  GW_HD Strata strata() const { return {count, k}; }
};

// Returns k of a tensor: a share of its elements, rounded, but at least 1.
int64_t randk_count(int64_t count, double ratio);

// The tensors of a bucket, in memory order, on the host and on the device. Built during set-up only; must
// outlive the ops that use the table.
class RandKTable {
 public:
  RandKTable() = default;
  // Computes each tensor's `packed`, a multiple of `unit`, and `k`; omits empty tensors.
  RandKTable(const Stream& stream, const std::vector<RandKTensor>& tensors, double ratio, int64_t unit = 1);

  const std::vector<RandKTensor>& host() const { return host_; }
  const RandKTensor* device() const { return device_.as<const RandKTensor>(); }
  int count() const { return static_cast<int>(host_.size()); }
  int64_t values() const { return values_; }  // sum of k over tensors, plus the gaps between tensors
  // Returns the end of the gap after the values of a tensor.
  int64_t gap_end(size_t tensor) const {
    return tensor + 1 < host_.size() ? host_[tensor + 1].packed : values_;
  }

 private:
  std::vector<RandKTensor> host_;
  Buffer device_;
  int64_t values_ = 0;
};

struct RandKGather {
  const RandKTable* table = nullptr;
  float* grad = nullptr;      // (count) in: the gradient, out: 0
  float* residual = nullptr;  // (count) in and out; null: no error feedback
  int64_t count = 0;          // elements of the bucket; gaps between tensors contain 0 and remain 0
  float* values = nullptr;    // (table values) out; 0 in gaps
  int64_t* chosen = nullptr;  // (table values) out: position of each value in grad; -1 in gaps
  uint64_t seed = 0;
  const uint64_t* step = nullptr;  // device memory; null means 0

  GW_HD RandKDraw draw_of(const RandKTensor& t) const { return {seed, step != nullptr ? *step : 0, t.index}; }
};
GW_OP(randk_gather, RandKGather)

// Arguments of the scatter: grad[chosen[j]] = values[j]. With a lossy format also residual[chosen[j]] =
// lost[j], the error of this rank's encode of the value. Moves 16 bytes per value, or 24 with `lost`. Limit:
// the memory's sectors.
struct RandKScatter {
  const int64_t* chosen = nullptr;  // (count), no two equal; negative: the value is ignored
  const float* values = nullptr;    // (count)
  const float* lost = nullptr;      // (count); null: lossless
  float* grad = nullptr;
  float* residual = nullptr;  // used only with `lost`
  int64_t count = 0;          // number of values
};
GW_OP(randk_scatter, RandKScatter)

}  // namespace gradwire
