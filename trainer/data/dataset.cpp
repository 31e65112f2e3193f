#include "trainer/data/dataset.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>
#include <zlib.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <memory>
#include <string_view>

#include "kernels/math/random.h"
#include "runtime/threads/thread_pool.h"
#include "runtime/util/error.h"

namespace gradwire {
namespace {

// The default size of synthetic data.
constexpr int64_t kSyntheticBytes = 64 << 20;
constexpr int64_t kSyntheticMost = 8192, kSyntheticLeast = 256;

}  // namespace

DataSplits load_data(const DataSpec& spec, const VitConfig& model, uint64_t seed, int64_t min_train) {
  switch (spec.kind) {
    case DataSpec::Kind::fashion_mnist:
      return load_fashion_mnist(spec.directory.empty() ? default_fashion_mnist_directory() : spec.directory);
    case DataSpec::Kind::cifar10:
      return load_cifar10(spec.directory);
    case DataSpec::Kind::synthetic:
      break;
  }
  check_model(model);
  int64_t image_bytes = int64_t{model.channels} * model.image * model.image;
  int64_t train = spec.count;
  if (train == 0) {
    train = std::clamp(kSyntheticBytes / image_bytes, kSyntheticLeast, kSyntheticMost);
    train = std::max(train, min_train);
  }
  return make_synthetic(model, train, std::clamp<int64_t>(train / 8, 1, 2048), seed);
}

void check_model_fits(const VitConfig& model, const Dataset& data) {
  std::string takes =
      fmt::format("model {} takes {}x{}x{} images", model.name, model.channels, model.image, model.image);
  if (data.height != data.width) {
    throw BadInput("{}: images of {}x{} are not square; the model takes only square images", data.name,
                   data.height, data.width);
  }
  if (model.channels != data.channels || model.image != data.height) {
    throw BadInput(
        "{}, but {} has {}x{}x{}; use --data synthetic, whose images fit, or --image-size {} and a --patch "
        "that divides it",
        takes, data.name, data.channels, data.height, data.width, data.height);
  }
  if (model.classes < data.classes) {
    throw BadInput("model {} has {} outputs, but {} has {} classes", model.name, model.classes, data.name,
                   data.classes);
  }
}

std::vector<uint8_t> read_file(const std::string& path, size_t limit_bytes, const std::string& remedy) {
  auto fail = [&](const std::string& why) { throw BadInput("{}: {}; {}", path, why, remedy); };
  struct stat status {};
  if (stat(path.c_str(), &status) != 0) fail(errno == ENOENT ? "no such file" : std::strerror(errno));
  if (!S_ISREG(status.st_mode)) fail("not a regular file");

  gzFile file = gzopen(path.c_str(), "rb");
  if (file == nullptr) fail(std::strerror(errno == 0 ? ENOMEM : errno));
  std::unique_ptr<gzFile_s, int (*)(gzFile)> closer(file, gzclose_r);
  gzbuffer(file, 1 << 18);

  std::vector<uint8_t> contents;
  constexpr size_t kChunk = 1 << 20;
  while (true) {
    size_t filled = contents.size();
    if (filled > limit_bytes) fail(fmt::format("larger than the limit of {} bytes", limit_bytes));
    contents.resize(filled + kChunk);
    int got = gzread(file, contents.data() + filled, kChunk);
    if (got < 0) {
      int code = 0;
      const char* text = gzerror(file, &code);
      bool truncated = code == Z_BUF_ERROR || std::strstr(text, "unexpected end") != nullptr;
      fail(truncated ? "truncated gzip file" : fmt::format("corrupt gzip file ({})", text));
    }
    contents.resize(filled + static_cast<size_t>(got));
    if (got == 0) break;
  }
  // Close explicitly: only closing reports a gzip stream that ends before its trailer.
  closer.release();
  if (int code = gzclose_r(file); code != Z_OK) {
    fail(code == Z_BUF_ERROR ? "truncated gzip file" : fmt::format("cannot be read (zlib error {})", code));
  }
  return contents;
}

namespace {

struct Kind {
  size_t at;  // offset of the signature in the file
  std::string_view signature;
  const char* text;
};

using namespace std::string_view_literals;

constexpr Kind kKinds[] = {
    {0, "version https://git-lfs"sv,
     "a Git LFS pointer, which stands for the file; run git lfs pull in its repository"},
    {0, "PK\x03\x04"sv, "a zip archive; unpack it"},
    {0, "\x1f\x8b"sv, "gzip data; unpack it with gunzip"},
    {0, "BZh"sv, "bzip2 data; unpack it with bunzip2"},
    {0,
     "\xfd"
     "7zXZ\0"sv,
     "xz data; unpack it with unxz"},
    {0, "\x28\xb5\x2f\xfd"sv, "zstd data; unpack it with unzstd"},
    {257, "ustar"sv, "a tar archive; unpack it with tar -xf"},
};

}  // namespace

std::string foreign_kind(std::span<const uint8_t> head) {
  const std::string_view text(reinterpret_cast<const char*>(head.data()),
                              std::min(head.size(), kFileKindBytes));
  // A tag, after white space: servers answer failed requests with such texts.
  const size_t begin = std::min(text.find_first_not_of(" \t\r\n\xef\xbb\xbf"), text.size());
  std::string word(text.substr(begin, 9));
  std::transform(word.begin(), word.end(), word.begin(), [](unsigned char c) { return std::tolower(c); });
  for (const char* tag : {"<!doctype", "<html", "<?xml", "<head", "<body", "<!--"}) {
    if (word.starts_with(tag))
      return "an HTML or XML page, as a failed download leaves it; download the file again";
  }
  for (const Kind& kind : kKinds) {
    if (text.size() >= kind.at && text.substr(kind.at).starts_with(kind.signature)) return kind.text;
  }
  return "";
}

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

// Synthetic images that a classifier can learn: each class has a smooth pattern; an image is that pattern
// shifted by a few pixels, plus noise. The data are a pure function of (shape, counts, seed). The generator
// is counter-based, so every process gets the same bytes.

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
