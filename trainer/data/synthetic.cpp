// Synthetic images that a classifier can learn: each class has a smooth pattern; an image is that pattern
// shifted by a few pixels, plus noise. The data are a pure function of (shape, counts, seed). The generator
// is counter-based, so every process gets the same bytes.
#include <algorithm>
#include <cmath>

#include "kernels/math/random.h"
#include "runtime/threads/thread_pool.h"
#include "runtime/util/error.h"
#include "trainer/data/dataset.h"
#include "trainer/data/normalization.h"

namespace gradwire {
namespace {

constexpr int kKnots = 5;           // a pattern is a kKnots x kKnots grid of normal draws, interpolated
constexpr float kContrast = 44.0f;  // gray levels per standard deviation of the pattern
constexpr int kNoise = 3;           // the noise is the sum of two bytes, divided by kNoise
enum SyntheticStream : uint64_t {
  kPatternStream = 0x5359'0001,
  kTrainStream = 0x5359'0002,
  kTestStream = 0x5359'0003
};

// Returns the pattern of every class: gray levels (channels, height, width).
std::vector<float> class_patterns(const VitConfig& shape, uint64_t seed) {
  int64_t size = shape.image, plane = size * size;
  std::vector<float> patterns(static_cast<size_t>(shape.classes * shape.channels * plane));
  parallel_for(int64_t{shape.classes} * shape.channels, 1, [&](int64_t begin, int64_t end) {
    for (int64_t layer = begin; layer < end; ++layer) {
      float knots[kKnots][kKnots];
      for (int k = 0; k < kKnots * kKnots; ++k) {
        uint64_t counter = static_cast<uint64_t>(layer) * kKnots * kKnots + static_cast<uint64_t>(k);
        knots[k / kKnots][k % kKnots] = rough_normal(philox(seed, kPatternStream, counter));
      }
      for (int64_t y = 0; y < size; ++y) {
        for (int64_t x = 0; x < size; ++x) {
          float fy = static_cast<float>(y) * (kKnots - 1) / static_cast<float>(size);
          float fx = static_cast<float>(x) * (kKnots - 1) / static_cast<float>(size);
          int ky = static_cast<int>(fy), kx = static_cast<int>(fx);
          float ty = fy - static_cast<float>(ky), tx = fx - static_cast<float>(kx);
          float top = knots[ky][kx] * (1 - tx) + knots[ky][kx + 1] * tx;
          float bottom = knots[ky + 1][kx] * (1 - tx) + knots[ky + 1][kx + 1] * tx;
          patterns[static_cast<size_t>(layer * plane + y * size + x)] =
              128 + kContrast * (top * (1 - ty) + bottom * ty);
        }
      }
    }
  });
  return patterns;
}

Dataset draw(const VitConfig& shape, const std::vector<float>& patterns, int64_t count, uint64_t seed,
             uint64_t stream) {
  Dataset data;
  data.name = "synthetic";
  data.channels = shape.channels;
  data.height = data.width = shape.image;
  data.classes = shape.classes;
  data.labels.resize(static_cast<size_t>(count));
  int64_t size = shape.image, plane = size * size, elements = data.image_elements();
  data.images.resize(static_cast<size_t>(count * elements));
  int reach = static_cast<int>(size / 14);  // the pattern is shifted by -reach..reach pixels
  uint64_t draws = static_cast<uint64_t>((elements + 7) / 8) + 1;
  parallel_for(count, 16, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      uint64_t counter = static_cast<uint64_t>(i) * draws;
      Random4 move = philox(seed, stream, counter++);
      int64_t dy = static_cast<int64_t>(move.v[0] % static_cast<uint32_t>(2 * reach + 1)) - reach;
      int64_t dx = static_cast<int64_t>(move.v[1] % static_cast<uint32_t>(2 * reach + 1)) - reach;
      int32_t label = static_cast<int32_t>(i % shape.classes);
      data.labels[static_cast<size_t>(i)] = label;
      const float* pattern = patterns.data() + label * elements;
      uint8_t* image = data.images.data() + i * elements;
      Random4 bits{};
      for (int64_t e = 0; e < elements; ++e) {
        if (e % 8 == 0) bits = philox(seed, stream, counter++);
        int64_t c = e / plane, y = e % plane / size, x = e % size;
        int64_t from_y = std::clamp<int64_t>(y + dy, 0, size - 1),
                from_x = std::clamp<int64_t>(x + dx, 0, size - 1);
        uint32_t pair = bits.v[e % 8 / 2] >> (e % 2 * 16);
        int noise = static_cast<int>((pair & 0xff) + (pair >> 8 & 0xff)) - 255;
        float value = pattern[c * plane + from_y * size + from_x] + static_cast<float>(noise / kNoise);
        image[e] = static_cast<uint8_t>(std::clamp(value, 0.0f, 255.0f));
      }
    }
  });
  return data;
}

}  // namespace

DataSplits make_synthetic(const VitConfig& shape, int64_t train_count, int64_t test_count, uint64_t seed) {
  check_model(shape);
  if (train_count < 1 || test_count < 1)
    throw BadInput("synthetic data needs at least one training and one test image");
  std::vector<float> patterns = class_patterns(shape, seed);
  DataSplits splits{draw(shape, patterns, train_count, seed, kTrainStream),
                    draw(shape, patterns, test_count, seed, kTestStream)};
  set_statistics(splits);
  return splits;
}

}  // namespace gradwire
