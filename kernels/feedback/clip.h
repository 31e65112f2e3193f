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
#pragma once

#include <cmath>
#include <cstdint>

#include "kernels/math/hd.h"
#include "kernels/op.h"

namespace gradwire {

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
