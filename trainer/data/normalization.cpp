#include "trainer/data/normalization.h"

#include <array>
#include <cmath>

namespace gradwire {

void set_statistics(DataSplits& splits) {
  Dataset& train = splits.train;
  size_t plane = static_cast<size_t>(train.height) * train.width;
  for (int32_t c = 0; c < train.channels; ++c) {
    std::array<int64_t, 256> seen{};
    for (int64_t i = 0; i < train.count(); ++i) {
      const uint8_t* pixels = train.images.data() + (static_cast<size_t>(i) * train.channels + c) * plane;
      for (size_t p = 0; p < plane; ++p) ++seen[pixels[p]];
    }
    double count = 0, sum = 0, squares = 0;
    for (size_t v = 0; v < seen.size(); ++v) {
      double n = static_cast<double>(seen[v]), x = static_cast<double>(v);
      count += n;
      sum += n * x;
      squares += n * x * x;
    }
    double mean = count > 0 ? sum / count : 0;
    double variance = count > 0 ? squares / count - mean * mean : 0;
    train.mean.push_back(static_cast<float>(mean / 255));
    train.stddev.push_back(variance > 0 ? static_cast<float>(std::sqrt(variance) / 255) : 1.0f);
  }
  splits.test.mean = train.mean;
  splits.test.stddev = train.stddev;
}

}  // namespace gradwire
