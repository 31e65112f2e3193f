// Element-wise passes over flat arrays: error feedback's policies, local clipping, optimizers, 16-bit floats.
// One pass, one launch. Limit: memory bandwidth. Alignment: any (16 bytes are fast). Deterministic.
//
// A pass is a struct of arguments, whose each() has the arithmetic of one element, and a row of GW_PASSES.
// The loops over elements are in kernels/simd/vector.h (host) and kernels/cuda/vector.cuh. There is no
// reference: tests state the formulas.
#pragma once

#include <cmath>
#include <cstdint>

#include "kernels/math/small_float.h"
#include "kernels/op.h"

namespace gradwire {

// Returns a * b + c * d. The sum and its first product are rounded once on CUDA, and on the host where the
// compiler contracts them.
GW_HD float multiply_add(float a, float b, float c, float d = 1.0f) {
#ifdef __CUDACC__
  return fmaf(a, b, c * d);
#else
  return a * b + c * d;
#endif
}

// Passes of error feedback's policies around a bucket's collective (pipeline.h), with the same bits on
// every device.
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
struct Ef21Difference {
  float* grad = nullptr;            // (count) in and out
  float* residual = nullptr;        // (count) in: the deviation, out: 0
  const float* estimate = nullptr;  // (count)
  float* kept = nullptr;            // (count) out
  float unit = 1.0f;  // a mean over ranks is `unit` times the estimate: 1, or 1 / ranks for sums
  int64_t count = 0;

  template <typename Loop>
  GW_HD void each(const Loop& loop) const {
    loop(
        [unit = unit](float& kept, float& g, float& d, float h) GW_HD_LAMBDA {
          const bool finite = is_finite(g);
          kept = finite ? g - unit * h : d;
          g = finite ? kept - d : g;
          d = 0.0f;
        },
        writes(kept), updates(grad), updates(residual), reads(estimate));
  }
};

struct Ef21Update {
  float* grad = nullptr;        // (count) in: the averaged difference, out: the estimate
  float* residual = nullptr;    // (count) in: the errors of this rank's encodes, out: the deviation
  float* estimate = nullptr;    // (count) in and out
  const float* kept = nullptr;  // (count)
  float unit = 1.0f;            // as in Ef21Difference
  int64_t count = 0;

  template <typename Loop>
  GW_HD void each(const Loop& loop) const {
    loop(
        [unit = unit](float& d, float& h, float& mean, float kept) GW_HD_LAMBDA {
          const float next = h + mean, deviation = kept - d - unit * mean;
          const bool finite = is_finite(next);
          d = finite && is_finite(deviation) ? deviation : 0.0f;
          h = finite ? next : h;
          mean = next;
        },
        updates(residual), updates(estimate), updates(grad), reads(kept));
  }
};

// Momentum correction (Lin et al., Deep Gradient Compression, ICLR 2018):
//
//   momentum_add      momentum = factor * momentum + grad; grad = momentum. Where the gradient is not finite,
//                     momentum and grad are unchanged                                        16 B/element
//   -- grad is compressed and averaged over ranks --
//   momentum_mask     momentum = 0 where grad is not 0, that is, where a value was sent       12 B/element
struct MomentumAdd {
  float* grad = nullptr;      // (count) in and out
  float* momentum = nullptr;  // (count) in and out
  float factor = 0.0f;
  int64_t count = 0;

  template <typename Loop>
  GW_HD void each(const Loop& loop) const {
    loop(
        [factor = factor](float g, float& u, float& sent) GW_HD_LAMBDA {
          const float next = factor * u + g;
          const bool finite = is_finite(g);
          u = !finite ? u : is_finite(next) ? next : 0.0f;
          sent = finite ? next : g;
        },
        reads(grad), updates(momentum), writes(grad));
  }
};

struct MomentumMask {
  const float* grad = nullptr;  // (count)
  float* momentum = nullptr;    // (count) in and out
  int64_t count = 0;

  template <typename Loop>
  GW_HD void each(const Loop& loop) const {
    loop([](float g, float& u) GW_HD_LAMBDA { u = g != 0.0f ? 0.0f : u; }, reads(grad), updates(momentum));
  }
};

// Values that change between steps (learning rate, bias corrections) are read from device memory, so that a
// captured CUDA graph can be replayed: write an OptimizerScalars there with store() in stream order. The BF16
// copy of the parameters, for products with BF16 operands, is written in the same pass, which moves 2 B per
// element instead of 6 B in a separate pass.
struct OptimizerScalars {
  float lr = 0.0f;
  float correction1 = 1.0f;  // 1 - beta1^t, AdamW only
  float correction2 = 1.0f;  // 1 - beta2^t, AdamW only
};

// PyTorch's SGD: g = grad + weight_decay * w; v = momentum * v + g (v = g in the first step, as with a zeroed
// v); w -= lr * v. Moves 20 B per element with momentum, 12 B without.
struct SgdStep {
  float* params = nullptr;
  const float* grads = nullptr;
  float* velocity = nullptr;  // null when momentum == 0
  int64_t count = 0;
  float momentum = 0.0f, weight_decay = 0.0f;
  const OptimizerScalars* scalars = nullptr;  // device memory
  Bf16* rounded = nullptr;                    // the new params as BF16; may be null

  template <typename Loop>
  GW_HD void each(const Loop& loop) const {
    const float lr = loop.once(&scalars->lr);
    loop(
        [lr, decay = weight_decay, momentum = momentum, has_velocity = velocity != nullptr](
            float w, float g, float& v, float& next, float& rounded) GW_HD_LAMBDA {
          g = multiply_add(decay, w, g);
          if (has_velocity) v = g = multiply_add(momentum, v, g);
          next = rounded = multiply_add(-lr, g, w);
        },
        reads(params), reads(grads), updates_if(velocity), writes(params), writes_if(rounded));
  }
};

// AdamW (Loshchilov and Hutter, arXiv 1711.05101) as PyTorch computes it: w *= 1 - lr * weight_decay; m = b1
// m + (1-b1) g; v = b2 v + (1-b2) g^2; w -= lr / correction1 * m / (sqrt(v) / sqrt(correction2) + eps). Moves
// 28 B per element.
struct AdamWStep {
  float* params = nullptr;
  const float* grads = nullptr;
  float* m = nullptr;
  float* v = nullptr;
  int64_t count = 0;
  float beta1 = 0.9f, beta2 = 0.999f, eps = 1e-8f, weight_decay = 0.01f;
  const OptimizerScalars* scalars = nullptr;  // device memory
  Bf16* rounded = nullptr;                    // the new params as BF16; may be null

  template <typename Loop>
  GW_HD void each(const Loop& loop) const {
    const OptimizerScalars s = loop.once(scalars);
    const float keep = multiply_add(-s.lr, weight_decay, 1.0f), step = s.lr / s.correction1;
    const float root_correction = 1.0f / sqrtf(s.correction2), c1 = 1.0f - beta1, c2 = 1.0f - beta2;
    loop(
        [=, b1 = beta1, b2 = beta2, eps = eps](float w, float g, float& m, float& v, float& next,
                                               float& rounded) GW_HD_LAMBDA {
          m = multiply_add(b1, m, c1, g);
          v = multiply_add(b2, v, c2 * g, g);
          next = rounded = multiply_add(keep, w, -(step * m / multiply_add(sqrtf(v), root_correction, eps)));
        },
        reads(params), reads(grads), updates(m), updates(v), writes(params), writes_if(rounded));
  }
};

// 16-bit floats in the caller's memory, which are summed as FP32: widened before a collective, rounded after
// it. Moves 6 B per element.
//
// FP16 is not a wire format: it would break two promises of wire formats (kernels/wire/format.h). Values
// beyond 65504 would saturate and stay in the residual, unseen by loss scaling. Below 2^-14 a power-of-two
// scale, which sums of parts use on the wire, changes how a value is rounded.
struct Fp16Widen {
  const uint16_t* halves = nullptr;  // (count)
  float* out = nullptr;              // (count)
  int64_t count = 0;

  static constexpr int kWidth = 8;  // elements of a 16-byte access on CUDA
  template <typename Loop>
  GW_HD void each(const Loop& loop) const {
    loop([](uint16_t half, float& x) GW_HD_LAMBDA { x = fp16_to_float(half); }, reads(halves), writes(out));
  }
};

// Arguments of rounding to FP16: rounds to nearest; values beyond FP16's range become infinity.
struct Fp16Narrow {
  const float* values = nullptr;  // (count)
  uint16_t* out = nullptr;        // (count)
  int64_t count = 0;

  static constexpr int kWidth = 8;
  template <typename Loop>
  GW_HD void each(const Loop& loop) const {
    loop([](float x, uint16_t& half) GW_HD_LAMBDA { half = float_to_fp16(x); }, reads(values), writes(out));
  }
};

// The table of passes. FUSED: the host may round a product and its sum once. BY_HAND: the host's loop is in
// passes.cpp, because the common loop is 10 to 25 % slower in cache (GCC 12 loads values twice).
#define GW_PASSES(PASS, FUSED, BY_HAND) \
  PASS(ef21_difference, Ef21Difference) \
  BY_HAND(ef21_update, Ef21Update)      \
  BY_HAND(momentum_add, MomentumAdd)    \
  PASS(momentum_mask, MomentumMask)     \
  PASS(fp16_widen, Fp16Widen)           \
  PASS(fp16_narrow, Fp16Narrow)         \
  FUSED(sgd_step, SgdStep)              \
  FUSED(adamw_step, AdamWStep)
#define GW_NO_PASS(op, Args)
GW_PASSES(GW_OP, GW_OP, GW_OP)

// Local gradient clipping: an array whose L2 norm exceeds max_norm is scaled to that norm (Lin et al., Deep
// Gradient Compression, ICLR 2018, which clips each tensor of each rank before it adds a residual). The same
// bits on every device. Bytes: 4 per element; 8 more where the array is clipped.
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

// The second stage of clipping.
struct ClipScale {
  float* grad;
  float factor;
  int64_t count;

  template <typename Loop>
  GW_HD void each(const Loop& loop) const {
    loop([factor = factor](float& g) GW_HD_LAMBDA { g = is_finite(g) ? g * factor : g; }, updates(grad));
  }
};

}  // namespace gradwire
