// Element-wise passes of error feedback's policies around a bucket's collective (policy_codec.cpp). Limit:
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

#include <cstdint>

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

}  // namespace gradwire
