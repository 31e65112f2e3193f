// All ops in a ViT's forward and backward pass except matrix products, and definitions that the headers of
// these ops share.
//
// Shapes: B images, T tokens (patches + 1 class token), C width, H heads, D = C / H, F MLP width, K classes.
// All arrays are dense and row-major unless a leading dimension is given. Backward ops *overwrite* parameter
// gradients unless `accumulate` is set. Reductions over rows have a fixed order: deterministic, no float
// atomics. Limit everywhere: memory bandwidth.
//
// S is the storage type of the operands of matrix products: float, or Bf16 (docs/training.md). Arrays that no
// matrix product reads or writes are float: the residual stream and its gradient, scores before softmax,
// statistics, parameters and their gradients. All arithmetic is FP32, rounded once, when an S is stored.
// In-place use of arrays of two types is allowed for S = float only. Bytes per element are given for float,
// then for Bf16.
#pragma once

#include "kernels/vit/attention.h"
#include "kernels/vit/elementwise.h"
#include "kernels/vit/layer_norm.h"
#include "kernels/vit/softmax.h"
