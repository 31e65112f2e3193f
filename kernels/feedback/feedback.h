// Element-wise passes of error feedback's policies around a bucket's collective (pipeline.h). Limit:
// memory bandwidth. Alignment: any (16 bytes are fast). Deterministic; the same bits on every device.
//
// EF21: each rank has an estimate of its gradient g, stored as the mean h of all ranks' estimates plus the
// rank's deviation d from the mean.
//
//   ef21_difference   kept = g - h; grad = kept - d; residual = 0                            24 B/element
//   -- grad is compressed and averaged over ranks; the residual receives what this rank's encodes lost --
//   ef21_update       h += grad; residual = kept - residual - grad, the new d; grad = h       28 B/element
//
// The residual's array holds d between steps. Where a gradient is not finite, ef21_difference leaves it and
// takes the rank's estimate for `kept`. Where the new h would not be finite, ef21_update leaves h, sets d to
// 0 and shows the non-finite value in grad, on every rank.
//
// Momentum correction (Lin et al., Deep Gradient Compression, ICLR 2018):
//
//   momentum_add      momentum = factor * momentum + grad; grad = momentum. Where the gradient is not finite,
//                     momentum and grad are unchanged                                        16 B/element
//   -- grad is compressed and averaged over ranks --
//   momentum_mask     momentum = 0 where grad is not 0, that is, where a value was sent       12 B/element
#pragma once

#include <cmath>
#include <cstdint>

#include "kernels/math/small_float.h"
#include "kernels/op.h"

namespace gradwire {

struct Ef21Difference {
  float* grad = nullptr;            // (count) in and out
  float* residual = nullptr;        // (count) in: the deviation, out: 0
  const float* estimate = nullptr;  // (count)
  float* kept = nullptr;            // (count) out
  float unit = 1.0f;  // a mean over ranks is `unit` times the estimate: 1, or 1 / ranks for sums
  int64_t count = 0;
};
GW_OP(ef21_difference, Ef21Difference)

struct Ef21Update {
  float* grad = nullptr;        // (count) in: the averaged difference, out: the estimate
  float* residual = nullptr;    // (count) in: the errors of this rank's encodes, out: the deviation
  float* estimate = nullptr;    // (count) in and out
  const float* kept = nullptr;  // (count)
  float unit = 1.0f;            // as in Ef21Difference
  int64_t count = 0;
};
GW_OP(ef21_update, Ef21Update)

struct MomentumAdd {
  float* grad = nullptr;      // (count) in and out
  float* momentum = nullptr;  // (count) in and out
  float factor = 0.0f;
  int64_t count = 0;
};
GW_OP(momentum_add, MomentumAdd)

struct MomentumMask {
  const float* grad = nullptr;  // (count)
  float* momentum = nullptr;    // (count) in and out
  int64_t count = 0;
};
GW_OP(momentum_mask, MomentumMask)

// Local gradient clipping: an array whose L2 norm exceeds max_norm is scaled to that norm (Lin et al., Deep
// Gradient Compression, ICLR 2018, which clips each tensor of each rank before it adds a residual). Limit:
// memory bandwidth. Alignment: any (16 bytes are fast). Deterministic; the same bits on every device.
//
// Bytes: 4 per element; 8 more where the array is clipped.
//
// Squares are summed in FP64, in a fixed order: in each chunk of kClipChunk elements, lane j of kClipLanes
// adds elements j, j + kClipLanes, ...; clip_fold() adds the lanes; lane j of kClipFold adds the sums of
// chunks j, j + kClipFold, ...; then these lanes are halved. Elements that are not finite do not count and
// stay.

inline constexpr int kClipChunk = 8192, kClipLanes = 1024, kClipFold = kClipLanes / 4;

// Returns the number of doubles in the workspace.
GW_HD constexpr int64_t clip_chunks(int64_t count) {
  return (count + kClipChunk - 1) / kClipChunk;
}

struct ClipNorm {
  float* grad = nullptr;     // (count) in and out
  double* chunks = nullptr;  // (clip_chunks(count)) workspace
  float max_norm = 0.0f;     // above 0
  int64_t count = 0;
};
GW_OP(clip_norm, ClipNorm)

// Returns the sum of four adjacent lanes.
GW_HD double clip_fold(double a, double b, double c, double d) {
  return (a + c) + (b + d);
}

// Returns the factor of an array with this sum of squares; 1 where nothing is clipped.
GW_HD float clip_factor(double squares, float max_norm) {
  const double norm = sqrt(squares);
  return norm > static_cast<double>(max_norm) ? static_cast<float>(static_cast<double>(max_norm) / norm)
                                              : 1.0f;
}

}  // namespace gradwire
