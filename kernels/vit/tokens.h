// Conversion of images to tokens: builds the operand of the patch convolution, and adds class token, bias and
// position to the result of the convolution. Shapes and the storage type S: kernels/vit/vit.h.
#pragma once

#include <cstdint>

#include "kernels/op.h"

namespace gradwire {

// Arguments of patchify: patches(b, i, ch*p*p + y*p + x) = images(b, ch, (i / grid)*p + y, (i % grid)*p + x):
// the operand of the patch convolution as a product. Moves 8 B (FP32) or 6 B (BF16) per pixel. Image pixels
// beyond grid * patch are not used.
template <typename S = float>
struct Patchify {
  const float* images = nullptr;  // (B, channels, image, image)
  S* patches = nullptr;           // (B, grid * grid, channels * patch * patch), grid = image / patch
  int64_t batch = 0;
  int32_t channels = 0, image = 0, patch = 0;
};
GW_TYPED_OP(patchify, Patchify)

// Arguments of the assembly of tokens: x(b, 0) = class_token + position(0); x(b, 1 + i) = projected(b, i) +
// bias + position(1 + i). Moves 8 B (FP32) or 6 B (BF16) per element.
template <typename S = float>
struct AssembleTokens {
  const S* projected = nullptr;        // (B, T-1, C) patch projection without bias
  const float* bias = nullptr;         // (C)
  const float* class_token = nullptr;  // (C)
  const float* position = nullptr;     // (T, C)
  float* x = nullptr;                  // (B, T, C) out
  int64_t batch = 0, tokens = 0, width = 0;
};
GW_TYPED_OP(assemble_tokens, AssembleTokens)

// Arguments of the backward pass. From dx (B, T, C): d_projected (B, T-1, C) = dx without row 0 of each
// image; d_position (T, C), d_class_token (C) and d_bias (C) are sums over the batch (and over patches for
// d_bias). Moves 8 B (FP32) or 6 B (BF16) per element.
template <typename S = float>
struct AssembleTokensBackward {
  const float* dx = nullptr;
  S* d_projected = nullptr;
  float* d_bias = nullptr;
  float* d_class_token = nullptr;
  float* d_position = nullptr;
  int64_t batch = 0, tokens = 0, width = 0;
  bool accumulate = false;  // adds to the parameter gradients; d_projected is overwritten
};
GW_TYPED_OP(assemble_tokens_backward, AssembleTokensBackward)

}  // namespace gradwire
