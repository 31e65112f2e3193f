// Augmentation: a draw changes the pixels according to a scalar definition, depends only on seed, epoch and
// image, and has the right distribution.
#include <gtest/gtest.h>

#include <cmath>
#include <map>

#include "tests/trainer/files.h"
#include "trainer/data/loader.h"

namespace gradwire {
namespace {

constexpr Augmentation kBoth{.flip = true, .crop = true};

// Computes a pixel: RandomCrop of the image padded with zeros, then a flip, then normalization.
float expected(const std::vector<uint8_t>& pixels, int height, int width, const AugmentDraw& draw, int y,
               int x, float scale, float shift) {
  const int from_y = y + draw.dy, from_x = (draw.flip ? width - 1 - x : x) + draw.dx;
  const bool inside = from_y >= 0 && from_y < height && from_x >= 0 && from_x < width;
  const float pixel = inside ? pixels[from_y * width + from_x] : 0.0f;
  return pixel * scale + shift;
}

TEST(Augment, PixelsMatchTheFlippedCrop) {
  for (auto [height, width] : {std::pair{1, 1}, {1, 5}, {7, 3}, {28, 28}, {33, 65}}) {
    std::vector<uint8_t> pixels;
    for (int i = 0; i < height * width; ++i) pixels.push_back(static_cast<uint8_t>(i * 37 + 11));
    for (bool flip : {false, true}) {
      for (int dy : {-height - 1, -3, 0, 1, height}) {
        for (int dx : {-width - 1, -2, 0, 1, width - 1, width + 4}) {
          const AugmentDraw draw{flip, dy, dx};
          // The array has an extra value at either end, which must stay unchanged.
          std::vector<float> to(pixels.size() + 2, NAN);
          normalize_plane(pixels.data(), height, width, draw, 0.25f, -3.0f, to.data() + 1);
          EXPECT_TRUE(std::isnan(to.front()) && std::isnan(to.back()));
          for (int y = 0; y < height; ++y) {
            for (int x = 0; x < width; ++x) {
              ASSERT_EQ(to[1 + y * width + x], expected(pixels, height, width, draw, y, x, 0.25f, -3.0f))
                  << height << "x" << width << " flip " << flip << " dy " << dy << " dx " << dx << " at " << y
                  << ", " << x;
            }
          }
        }
      }
    }
  }
}

TEST(Augment, DrawsAreUniformAndDependOnSeedEpochAndImage) {
  constexpr int kImages = 20000;
  int flips = 0, same_seed = 0, same_epoch = 0;
  std::map<int, int> dy, dx;
  for (int i = 0; i < kImages; ++i) {
    const AugmentDraw draw = draw_augmentation(kBoth, 3, 1, i, 28, 32);
    flips += draw.flip;
    ++dy[draw.dy];
    ++dx[draw.dx];
    auto equal = [&](const AugmentDraw& other) {
      return draw.flip == other.flip && draw.dy == other.dy && draw.dx == other.dx;
    };
    same_seed += equal(draw_augmentation(kBoth, 4, 1, i, 28, 32));
    same_epoch += equal(draw_augmentation(kBoth, 3, 2, i, 28, 32));
    EXPECT_TRUE(equal(draw_augmentation(kBoth, 3, 1, i, 28, 32)));
    const AugmentDraw flip_only = draw_augmentation({.flip = true}, 3, 1, i, 28, 32);
    EXPECT_TRUE(flip_only.flip == draw.flip && flip_only.dy == 0 && flip_only.dx == 0);
  }
  EXPECT_NEAR(flips, kImages / 2, 350);  // 5 standard deviations
  ASSERT_EQ(dy.size(), 9u);
  ASSERT_EQ(dx.size(), 9u);
  for (int offset = -4; offset <= 4; ++offset) {
    EXPECT_NEAR(dy[offset], kImages / 9, 225);
    EXPECT_NEAR(dx[offset], kImages / 9, 225);
  }
  EXPECT_NEAR(same_seed, kImages / 162, 60);
  EXPECT_NEAR(same_epoch, kImages / 162, 60);
  EXPECT_EQ(crop_padding(224), 28);
}

Dataset pictures(int64_t count) {
  Dataset data;
  data.name = "pictures";
  data.channels = 2;
  data.height = data.width = 9;
  data.classes = 1 << 20;
  for (int64_t i = 0; i < count; ++i) data.labels.push_back(static_cast<int32_t>(i));
  for (int64_t e = 0; e < count * data.image_elements(); ++e) {
    data.images.push_back(static_cast<uint8_t>(e * e / 7 + 13 * e));
  }
  data.mean = {0.25f, 0.5f};
  data.stddev = {0.5f, 1.5f};
  return data;
}

using Images = std::map<int32_t, std::vector<float>>;  // images by label; the label is the index

Images epoch_of(const Dataset& data, LoaderOptions options, int64_t batches) {
  const Stream stream = Stream::immediate_host();
  Loader loader(data, options);
  Images all;
  for (int64_t b = 0; b < batches; ++b) {
    const Loader::Batch batch = loader.next(stream);
    for (int64_t i = 0; i < batch.count; ++i) {
      const float* image = batch.images + i * data.image_elements();
      all[batch.labels[i]].assign(image, image + data.image_elements());
    }
    loader.release(stream);
  }
  return all;
}

TEST(Augment, ImagesDoNotDependOnRanksBatchSizeAndFirstBatch) {
  const Dataset data = pictures(48);
  const LoaderOptions one{.batch_size = 48, .augment = kBoth, .seed = 8, .first_batch = 2};
  const Images epoch = epoch_of(data, one, 1);  // epoch 2
  ASSERT_EQ(epoch.size(), 48u);
  Images together;
  for (int rank = 0; rank < 3; ++rank) {
    LoaderOptions part = one;
    part.rank = rank;
    part.world = 3;
    part.batch_size = 4;
    part.first_batch = 2 * 4 + 1;  // start at the second batch of epoch 2
    together.merge(epoch_of(data, part, 3));
  }
  EXPECT_EQ(together.size(), 36u);
  for (const auto& [label, image] : together) EXPECT_EQ(image, epoch.at(label)) << label;

  const Images next = epoch_of(data, {.batch_size = 48, .augment = kBoth, .seed = 8, .first_batch = 3}, 1);
  const Images plain = epoch_of(data, {.batch_size = 48, .seed = 8, .first_batch = 2}, 1);
  EXPECT_NE(next, epoch);
  EXPECT_NE(plain, epoch);
  // Each image is the plain image, flipped and shifted as AugmentDraw defines.
  for (const auto& [label, image] : epoch) {
    const AugmentDraw draw = draw_augmentation(kBoth, 8, 2, label, 9, 9);
    for (int64_t c = 0; c < 2; ++c) {
      const float black = -data.mean[c] / data.stddev[c];
      for (int64_t y = 0; y < 9; ++y) {
        for (int64_t x = 0; x < 9; ++x) {
          const int64_t from_y = y + draw.dy, from_x = (draw.flip ? 8 - x : x) + draw.dx;
          const bool inside = from_y >= 0 && from_y < 9 && from_x >= 0 && from_x < 9;
          ASSERT_EQ(image[c * 81 + y * 9 + x],
                    inside ? plain.at(label)[c * 81 + from_y * 9 + from_x] : black);
        }
      }
    }
  }
}

TEST(Augment, SpecsRoundTripAndInvalidOnesAreRejected) {
  for (const char* text : {"none", "flip", "crop", "flip,crop"}) {
    EXPECT_EQ(Augmentation::parse(text).to_string(), text);
  }
  EXPECT_EQ(Augmentation::parse("crop,flip"), kBoth);
  EXPECT_FALSE(Augmentation::parse("none").any());
  testing::expect_bad_input([] { Augmentation::parse("mirror"); }, {"mirror", "flip,crop"});
  testing::expect_bad_input([] { Augmentation::parse("flip,flip"); }, {"twice"});
  testing::expect_bad_input([] { Augmentation::parse("none,flip"); }, {"none"});
  testing::expect_bad_input([] { Augmentation::parse(""); }, {"use none"});
  testing::expect_bad_input([] { Augmentation::parse("flip,"); }, {"use none"});
}

}  // namespace
}  // namespace gradwire
