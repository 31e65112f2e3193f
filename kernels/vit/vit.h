// Everything in a ViT's forward and backward pass that is not a matrix product, and what its headers share.
//
// Shapes: B images, T tokens (patches + 1 class token), C width, H heads, D = C / H, F MLP width, K classes.
// All arrays are dense and row-major unless a leading dimension is given. Backward ops *overwrite* parameter
// gradients unless `accumulate` says otherwise. Reductions over rows run in a fixed order: deterministic, no
// float atomics. Limit everywhere: memory bandwidth.
//
// S is how the operands of matrix products are stored: float, or Bf16 (docs/training.md). What only these
// ops read and write is float: the residual stream and its gradient, scores before softmax, statistics,
// parameters and their gradients. All arithmetic is FP32, and rounded once, when an S is stored. "In place",
// of arrays of two types, holds for S = float. Bytes per element are given for float, then for Bf16.
#pragma once

#include "kernels/vit/attention.h"
#include "kernels/vit/bias.h"
#include "kernels/vit/cross_entropy.h"
#include "kernels/vit/gelu.h"
#include "kernels/vit/heads.h"
#include "kernels/vit/layer_norm.h"
#include "kernels/vit/softmax.h"
#include "kernels/vit/tokens.h"
