#include "trainer/data/augment.h"

#include <algorithm>

#include "kernels/math/random.h"
#include "kernels/simd/vector.h"

namespace gradwire {
namespace {

constexpr uint64_t kAugmentStream = 0x4155'0001;  // stream of the random generator

GW_SIMD void normalize(const uint8_t* from, int64_t count, float scale, float shift, float* to) {
  for (int64_t i = 0; i < count; ++i) to[i] = static_cast<float>(from[i]) * scale + shift;
}

// Normalizes a row of pixels and writes the values in reverse order. `to_end`: one past the last value, which
// belongs to the first pixel.
GW_SIMD void normalize_reversed(const uint8_t* from, int64_t count, float scale, float shift, float* to_end) {
  float* to = to_end - count;
  for (int64_t i = 0; i < count; ++i) to[i] = static_cast<float>(from[count - 1 - i]) * scale + shift;
}

int32_t uniform_below(uint32_t bits, int32_t end) {
  return static_cast<int32_t>(static_cast<uint64_t>(bits) * static_cast<uint64_t>(end) >> 32);
}

}  // namespace

int32_t crop_padding(int32_t side) {
  return (side + 7) / 8;
}

AugmentDraw draw_augmentation(const Augmentation& which, uint64_t seed, int64_t epoch, int64_t image,
                              int32_t height, int32_t width) {
  if (!which.any()) return {};
  const Random4 bits =
      philox(seed, kAugmentStream, static_cast<uint64_t>(epoch) << 40 | static_cast<uint64_t>(image));
  AugmentDraw draw;
  if (which.flip) draw.flip = (bits.v[0] >> 31) != 0;
  if (which.crop) {
    const int32_t up = crop_padding(height), left = crop_padding(width);
    draw.dy = uniform_below(bits.v[1], 2 * up + 1) - up;
    draw.dx = uniform_below(bits.v[2], 2 * left + 1) - left;
  }
  return draw;
}

void normalize_plane(const uint8_t* pixels, int32_t height, int32_t width, const AugmentDraw& draw,
                     float scale, float shift, float* to) {
  const int64_t plane = int64_t{1} * height * width;
  if (!draw.flip && draw.dy == 0 && draw.dx == 0) return normalize(pixels, plane, scale, shift, to);
  // Columns [begin, end) of each row of the crop are inside the image.
  const int32_t begin = std::clamp(-draw.dx, 0, width), end = std::clamp(width - draw.dx, begin, width);
  for (int32_t y = 0; y < height; ++y, to += width) {
    const int32_t from_y = y + draw.dy;
    if (from_y < 0 || from_y >= height) {
      std::fill_n(to, width, shift);  // black is 0, so 0 * scale + shift
      continue;
    }
    const uint8_t* from = pixels + int64_t{1} * from_y * width + (begin + draw.dx);
    if (draw.flip) {
      std::fill_n(to, width - end, shift);
      normalize_reversed(from, end - begin, scale, shift, to + (width - begin));
      std::fill_n(to + (width - begin), begin, shift);
    } else {
      std::fill_n(to, begin, shift);
      normalize(from, end - begin, scale, shift, to + begin);
      std::fill_n(to + end, width - end, shift);
    }
  }
}

}  // namespace gradwire
