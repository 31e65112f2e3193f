// Host patchify, assemble_tokens and assemble_tokens_backward.
#include <algorithm>
#include <cstring>

#include "kernels/simd/vector.h"
#include "kernels/vit/tokens.h"

namespace gradwire::host {
namespace {

void move_line(const float* from, int64_t count, float* to) {
  std::memcpy(to, from, static_cast<size_t>(count) * sizeof(float));
}
void move_line(const float* from, int64_t count, Bf16* to) {
  narrow_all(from, nullptr, count, to);
}

}  // namespace

template <typename S>
void patchify(const Patchify<S>& a) {
  if (a.patch <= 0) return;
  const int64_t patch = a.patch, grid = a.image / patch, image = a.image;
  const int64_t area = patch * patch, patch_elements = a.channels * area;
  // Each iteration of the loop handles one row of patches of one image.
  for_rows(a.batch * grid, grid * patch_elements, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const int64_t b = row / grid, gy = row % grid;
      for (int64_t gx = 0; gx < grid; ++gx) {
        S* out = a.patches + (row * grid + gx) * patch_elements;
        for (int64_t ch = 0; ch < a.channels; ++ch) {
          const float* in = a.images + ((b * a.channels + ch) * image + gy * patch) * image + gx * patch;
          for (int64_t y = 0; y < patch; ++y) {
            move_line(in + y * image, patch, out + ch * area + y * patch);
          }
        }
      }
    }
  });
}

namespace {

template <typename S>
GW_INLINE void assemble_image_of(const AssembleTokens<S>& a, int64_t b) {
  const int64_t width = a.width;
  const float *bias = a.bias, *class_token = a.class_token;
  float* x = a.x + b * a.tokens * width;
#pragma omp simd
  for (int64_t c = 0; c < width; ++c) x[c] = class_token[c] + a.position[c];
  for (int64_t t = 1; t < a.tokens; ++t) {
    const S* projected = a.projected + (b * (a.tokens - 1) + t - 1) * width;
    const float* position = a.position + t * width;
    float* row = x + t * width;
#pragma omp simd
    for (int64_t c = 0; c < width; ++c) row[c] = widen(projected[c]) + bias[c] + position[c];
  }
}

// Computes columns [begin, end) of the parameter gradients.
template <typename S>
GW_INLINE void reduce_columns_of(const AssembleTokensBackward<S>& a, int64_t begin, int64_t end) {
  constexpr int64_t kTile = 64;
  for (int64_t c0 = begin; c0 < end; c0 += kTile) {
    const int64_t n = std::min(kTile, end - c0);
    float d_bias[kTile] = {};
    for (int64_t t = 0; t < a.tokens; ++t) {
      float sum[kTile] = {};
      for (int64_t b = 0; b < a.batch; ++b) {
        const float* dx = a.dx + (b * a.tokens + t) * a.width + c0;
#pragma omp simd
        for (int64_t c = 0; c < n; ++c) sum[c] += dx[c];
      }
      float* d_position = a.d_position + t * a.width + c0;
      for (int64_t c = 0; c < n; ++c) {
        if (t > 0) d_bias[c] += sum[c];
        if (t == 0) a.d_class_token[c0 + c] = (a.accumulate ? a.d_class_token[c0 + c] : 0.0f) + sum[c];
        d_position[c] = (a.accumulate ? d_position[c] : 0.0f) + sum[c];
      }
    }
    for (int64_t c = 0; c < n; ++c) a.d_bias[c0 + c] = (a.accumulate ? a.d_bias[c0 + c] : 0.0f) + d_bias[c];
  }
}

GW_SIMD void assemble_image(const AssembleTokens<float>& a, int64_t b) {
  assemble_image_of(a, b);
}
GW_SIMD void assemble_image(const AssembleTokens<Bf16>& a, int64_t b) {
  assemble_image_of(a, b);
}
GW_SIMD void reduce_columns(const AssembleTokensBackward<float>& a, int64_t begin, int64_t end) {
  reduce_columns_of(a, begin, end);
}
GW_SIMD void reduce_columns(const AssembleTokensBackward<Bf16>& a, int64_t begin, int64_t end) {
  reduce_columns_of(a, begin, end);
}

}  // namespace

template <typename S>
void assemble_tokens(const AssembleTokens<S>& a) {
  if (a.tokens == 0) return;
  for_rows(a.batch, a.tokens * a.width, [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b) assemble_image(a, b);
  });
}

template <typename S>
void assemble_tokens_backward(const AssembleTokensBackward<S>& a) {
  if (a.tokens == 0) return;
  const int64_t patches = (a.tokens - 1) * a.width;
  for_rows(a.batch, a.tokens * a.width, [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b) {
      move_line(a.dx + b * a.tokens * a.width + a.width, patches, a.d_projected + b * patches);
    }
  });
  parallel_for(a.width, 64, [&](int64_t begin, int64_t end) { reduce_columns(a, begin, end); });
}

GW_INSTANTIATE_OP(patchify, Patchify)
GW_INSTANTIATE_OP(assemble_tokens, AssembleTokens)
GW_INSTANTIATE_OP(assemble_tokens_backward, AssembleTokensBackward)

}  // namespace gradwire::host
