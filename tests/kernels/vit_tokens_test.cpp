#include <fmt/format.h>

#include "kernels/vit/tokens.h"
#include "runtime/threads/thread_pool.h"
#include "tests/kernels/backend.h"
#include "tests/kernels/compare.h"

namespace gradwire::testing {
namespace {

class VitTokens : public OpTest {};

TEST_P(VitTokens, PatchifyMapsEveryPixelToItsPatch) {
  struct Shape {
    int64_t batch;
    int32_t channels, image, patch;
  };
  for (Shape s :
       {Shape{0, 1, 28, 7}, Shape{3, 1, 28, 7}, Shape{2, 3, 32, 4}, Shape{2, 3, 8, 8}, Shape{1, 3, 64, 32},
        Shape{2, 2, 17, 5}, Shape{1, 1, 3, 4}, Shape{1, 1, 1, 1}, Shape{5, 3, 9, 1}}) {
    SCOPED_TRACE(fmt::format("image {} patch {}", s.image, s.patch));
    int64_t grid = s.image / s.patch, pixels = s.batch * s.channels * s.image * s.image;
    int64_t count = s.batch * grid * grid * s.channels * s.patch * s.patch;
    std::vector<float> values(static_cast<size_t>(pixels)), want(static_cast<size_t>(count));
    for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i + 1);
    Patchify args{.images = values.data(),
                  .patches = want.data(),
                  .batch = s.batch,
                  .channels = s.channels,
                  .image = s.image,
                  .patch = s.patch};
    reference::patchify(args);
    for (int64_t misalign : {0, 1}) {
      auto images = array(values, misalign), patches = array<float>(count, misalign);
      args.images = images.data();
      args.patches = patches.data();
      GW_RUN(patchify, args);
      patches.expect_guards_intact("patches");
      expect_same_bits(patches.host(), want, "patches");
    }
  }
}

TEST_P(VitTokens, PatchifyFollowsTheContractsFormula) {
  const int32_t image = 6, patch = 2, channels = 2, grid = 3;
  auto values = normal(2 * channels * image * image, 1);
  auto images = array(values), patches = array<float>(static_cast<int64_t>(values.size()));
  Patchify args{.images = images.data(),
                .patches = patches.data(),
                .batch = 2,
                .channels = channels,
                .image = image,
                .patch = patch};
  GW_RUN(patchify, args);
  auto got = patches.host();
  size_t at = 0;
  for (int b = 0; b < 2; ++b)
    for (int i = 0; i < grid * grid; ++i)
      for (int ch = 0; ch < channels; ++ch)
        for (int y = 0; y < patch; ++y)
          for (int x = 0; x < patch; ++x, ++at) {
            int from = ((b * channels + ch) * image + i / grid * patch + y) * image + i % grid * patch + x;
            ASSERT_EQ(got[at], values[static_cast<size_t>(from)]);
          }
}

struct Shape {
  int64_t batch, tokens, width;
  int64_t size() const { return batch * tokens * width; }
  int64_t patches() const { return batch * std::max<int64_t>(0, tokens - 1) * width; }
  std::string name() const { return fmt::format("{}x{}x{}", batch, tokens, width); }
};
const std::vector<Shape> kShapes = {{0, 17, 64}, {1, 1, 1},   {1, 2, 7},    {3, 1, 33},   {5, 17, 64},
                                    {2, 50, 31}, {33, 5, 65}, {2, 5, 1024}, {3, 4, 1023}, {2, 197, 48}};

TEST_P(VitTokens, AssembleAddsClassTokenBiasAndPositions) {
  for (const Shape& s : kShapes) {
    auto projected = normal(s.patches(), 1), bias = normal(s.width, 2), class_token = normal(s.width, 3),
         position = normal(s.tokens * s.width, 4);
    std::vector<float> want(static_cast<size_t>(s.size()));
    reference::assemble_tokens({.projected = projected.data(),
                                .bias = bias.data(),
                                .class_token = class_token.data(),
                                .position = position.data(),
                                .x = want.data(),
                                .batch = s.batch,
                                .tokens = s.tokens,
                                .width = s.width});
    for (int64_t misalign : {0, 1}) {
      SCOPED_TRACE(fmt::format("{} misaligned by {}", s.name(), misalign));
      auto d_projected = array(projected, misalign), d_bias = array(bias, misalign),
           d_class_token = array(class_token, misalign), d_position = array(position, misalign);
      auto x = array<float>(s.size(), misalign);
      AssembleTokens args{.projected = d_projected.data(),
                          .bias = d_bias.data(),
                          .class_token = d_class_token.data(),
                          .position = d_position.data(),
                          .x = x.data(),
                          .batch = s.batch,
                          .tokens = s.tokens,
                          .width = s.width};
      GW_RUN(assemble_tokens, args);
      x.expect_guards_intact("x");
      expect_close(x.host(), want, 3e-7, "x");
    }
  }
}

struct Gradients {
  std::vector<float> d_projected, d_bias, d_class_token, d_position;
};

Gradients start(const Shape& s) {
  return {std::vector<float>(static_cast<size_t>(s.patches()), -7.0f), OpTest::normal(s.width, 12),
          OpTest::normal(s.width, 13), OpTest::normal(s.tokens * s.width, 14)};
}

template <typename Run>
void backward(const Run& run, const Shape& s, const float* dx, float* d_projected, float* d_bias,
              float* d_class_token, float* d_position, bool accumulate) {
  run(AssembleTokensBackward{.dx = dx,
                             .d_projected = d_projected,
                             .d_bias = d_bias,
                             .d_class_token = d_class_token,
                             .d_position = d_position,
                             .batch = s.batch,
                             .tokens = s.tokens,
                             .width = s.width,
                             .accumulate = accumulate});
}

TEST_P(VitTokens, AssembleBackwardMatchesTheDoubleReference) {
  for (const Shape& s : kShapes) {
    for (bool accumulate : {false, true}) {
      SCOPED_TRACE(s.name() + (accumulate ? " accumulating" : ""));
      auto dx = normal(s.size(), 11);
      Gradients want = start(s), in = start(s);
      backward([](const auto& args) { reference::assemble_tokens_backward(args); }, s, dx.data(),
               want.d_projected.data(), want.d_bias.data(), want.d_class_token.data(), want.d_position.data(),
               accumulate);
      auto d_dx = array(dx, accumulate ? 1 : 0), d_projected = array(in.d_projected, accumulate ? 1 : 0),
           d_bias = array(in.d_bias), d_class_token = array(in.d_class_token),
           d_position = array(in.d_position);
      backward([this](const auto& args) { GW_RUN(assemble_tokens_backward, args); }, s, d_dx.data(),
               d_projected.data(), d_bias.data(), d_class_token.data(), d_position.data(), accumulate);
      for (auto* a : {&d_projected, &d_bias, &d_class_token, &d_position})
        a->expect_guards_intact("a gradient");
      expect_same_bits(d_projected.host(), want.d_projected, "d_projected");
      expect_close(d_bias.host(), want.d_bias, 3e-6, "d_bias", 3.0);
      expect_close(d_class_token.host(), want.d_class_token, 2e-6, "d_class_token");
      expect_close(d_position.host(), want.d_position, 2e-6, "d_position");
    }
  }
}

TEST_P(VitTokens, AssembleBackwardIsTheDerivativeOfForward) {
  Shape s{3, 4, 5};
  auto projected = normal(s.patches(), 1), bias = normal(s.width, 2), class_token = normal(s.width, 3),
       position = normal(s.tokens * s.width, 4), dx = normal(s.size(), 5);
  auto loss = [&] {
    std::vector<float> x(static_cast<size_t>(s.size()));
    reference::assemble_tokens({.projected = projected.data(),
                                .bias = bias.data(),
                                .class_token = class_token.data(),
                                .position = position.data(),
                                .x = x.data(),
                                .batch = s.batch,
                                .tokens = s.tokens,
                                .width = s.width});
    return dot(x, dx);
  };
  auto d_dx = array(dx), d_projected = array<float>(s.patches()), d_bias = array<float>(s.width),
       d_class_token = array<float>(s.width), d_position = array<float>(s.tokens * s.width);
  backward([this](const auto& args) { GW_RUN(assemble_tokens_backward, args); }, s, d_dx.data(),
           d_projected.data(), d_bias.data(), d_class_token.data(), d_position.data(), false);
  auto check = [&](std::vector<float>& values, const std::vector<float>& got) {
    for (size_t i = 0; i < values.size(); ++i)
      EXPECT_NEAR(got[i], central_difference(values, i, loss), 2e-4) << i;
  };
  check(projected, d_projected.host());
  check(bias, d_bias.host());
  check(class_token, d_class_token.host());
  check(position, d_position.host());
}

TEST_P(VitTokens, AnyNumberOfThreadsGivesTheSameBits) {
  Shape s{40, 17, 200};
  auto dx = array(normal(s.size(), 11)), d_projected = array<float>(s.patches()),
       d_bias = array<float>(s.width), d_class_token = array<float>(s.width),
       d_position = array<float>(s.tokens * s.width);
  const int before = host_threads();
  std::vector<float> first_bias, first_position;
  auto counts = thread_counts();
  counts.insert(counts.begin(), before);
  for (int threads : counts) {
    set_host_threads(threads);
    backward([this](const auto& args) { GW_RUN(assemble_tokens_backward, args); }, s, dx.data(),
             d_projected.data(), d_bias.data(), d_class_token.data(), d_position.data(), false);
    if (first_bias.empty()) {
      first_bias = d_bias.host();
      first_position = d_position.host();
    }
    expect_same_bits(d_bias.host(), first_bias, "d_bias");
    expect_same_bits(d_position.host(), first_position, "d_position");
  }
  set_host_threads(before);
}

GW_INSTANTIATE_BACKENDS(VitTokens);

}  // namespace
}  // namespace gradwire::testing
