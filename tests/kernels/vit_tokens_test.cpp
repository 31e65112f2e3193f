#include "kernels/vit/elementwise.h"
#include "tests/kernels/operand.h"

namespace gradwire::testing {
namespace {

struct Image {
  int64_t batch;
  int32_t channels, image, patch;
  std::string name() const { return fmt::format("image {} patch {}", image, patch); }
};

struct Shape {
  int64_t batch, tokens, width;
  int64_t size() const { return batch * tokens * width; }
  int64_t patches() const { return batch * std::max<int64_t>(0, tokens - 1) * width; }
  std::string name() const { return fmt::format("{}x{}x{}", batch, tokens, width); }

  template <typename Args>
  Args operator()(Args args) const {
    args.batch = batch, args.tokens = tokens, args.width = width;
    return args;
  }
};
const std::vector<Shape> kShapes = {{0, 17, 64}, {1, 1, 1},   {1, 2, 7},    {3, 1, 33},   {5, 17, 64},
                                    {2, 50, 31}, {33, 5, 65}, {2, 5, 1024}, {3, 4, 1023}, {2, 197, 48}};

template <typename S>
struct Assemble {
  Operand<S> projected;
  Operand<float> bias, class_token, position, x;

  Assemble(OpFixture& test, const Shape& s, int64_t misalign = 0)
      : projected(test, normal(s.patches(), 1), misalign),
        bias(test, normal(s.width, 2), misalign),
        class_token(test, normal(s.width, 3), misalign),
        position(test, normal(s.tokens * s.width, 4), misalign),
        x(test, s.size(), misalign) {}
  template <typename Side>
  auto args(Side on, const Shape& s) {
    return s(AssembleTokens{.projected = on(projected),
                            .bias = on(bias),
                            .class_token = on(class_token),
                            .position = on(position),
                            .x = on(x)});
  }
};

template <typename S>
struct Backward {
  Operand<float> dx;
  Operand<S> d_projected;
  Operand<float> d_bias, d_class_token, d_position, workspace;

  Backward(OpFixture& test, const Shape& s, int64_t misalign = 0)
      : dx(test, normal(s.size(), 11), misalign),
        d_projected(test, s.patches(), misalign),
        d_bias(test, normal(s.width, 12)),
        d_class_token(test, normal(s.width, 13)),
        d_position(test, normal(s.tokens * s.width, 14)),
        workspace(test, (s.tokens - 1) * s.width) {}
};

class VitTokens : public OpTest {
 public:
  template <typename S>
  void check_patchify(const Image& s, int64_t misalign) {
    const int64_t grid = s.image / s.patch;
    Operand<float> images(*this, normal(s.batch * s.channels * s.image * s.image, 20), misalign);
    Operand<S> patches(*this, s.batch * grid * grid * s.channels * s.patch * s.patch, misalign);
    GW_RUN_BOTH(patchify, [&](auto on) {
      return Patchify{.images = on(images),
                      .patches = on(patches),
                      .batch = s.batch,
                      .channels = s.channels,
                      .image = s.image,
                      .patch = s.patch};
    });
    patches.host = widened(narrowed<S>(patches.host));
    patches.expect_same_bits("patches");
  }
  template <typename S>
  void check_assemble(const Shape& s, int64_t misalign) {
    Assemble<S> a(*this, s, misalign);
    GW_RUN_BOTH(assemble_tokens, [&](auto on) { return a.args(on, s); });
    a.x.expect_close("x", 3e-7);
  }
  template <typename S>
  void run(Backward<S>& b, const Shape& s, bool accumulate) {
    GW_RUN_BOTH(assemble_tokens_backward, [&](auto on) {
      auto args = s(AssembleTokensBackward{.dx = on(b.dx),
                                           .d_projected = on(b.d_projected),
                                           .d_bias = on(b.d_bias),
                                           .d_class_token = on(b.d_class_token),
                                           .d_position = on(b.d_position),
                                           .workspace = on(b.workspace)});
      args.accumulate = accumulate;
      return args;
    });
  }
  template <typename S>
  void check_backward(const Shape& s, int64_t misalign, bool accumulate) {
    Backward<S> b(*this, s, misalign);
    run(b, s, accumulate);
    b.d_projected.host = widened(narrowed<S>(b.d_projected.host));
    b.d_projected.expect_same_bits("d_projected");
    b.d_bias.expect_close("d_bias", 3e-6, 3.0);
    b.d_class_token.expect_close("d_class_token", 2e-6);
    b.d_position.expect_close("d_position", 2e-6);
  }
};

TEST_P(VitTokens, PatchifyMatchesTheReference) {
  const std::vector<Image> images = {{0, 1, 28, 7},  {3, 1, 28, 7}, {2, 3, 32, 4}, {2, 3, 8, 8},
                                     {1, 3, 64, 32}, {2, 2, 17, 5}, {1, 1, 3, 4},  {1, 1, 1, 1},
                                     {5, 3, 9, 1},   {2, 2, 16, 8}};
  for_shapes(images, [&](const Image& image, int64_t misalign) {
    check_patchify<float>(image, misalign);
    check_patchify<Bf16>(image, misalign);
  });
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
            ASSERT_EQ(got[at], values[from]);
          }
}

TEST_P(VitTokens, AssembleAddsClassTokenBiasAndPositions) {
  for_shapes(kShapes, [&](const Shape& s, int64_t misalign) {
    check_assemble<float>(s, misalign);
    check_assemble<Bf16>(s, misalign);
  });
}

TEST_P(VitTokens, AssembleBackwardMatchesTheDoubleReference) {
  for_shapes(kShapes, [&](const Shape& s, int64_t misalign) {
    for (bool accumulate : {false, true}) {
      check_backward<float>(s, misalign, accumulate);
      check_backward<Bf16>(s, misalign, accumulate);
    }
  });
}

TEST_P(VitTokens, AssembleBackwardIsTheDerivativeOfForward) {
  const Shape s{3, 4, 5};
  Assemble<float> a(*this, s);
  Backward<float> b(*this, s);
  run(b, s, false);
  auto loss = [&] {
    reference::assemble_tokens(a.args(OnHost{}, s));
    return dot(a.x.host, b.dx.host);
  };
  auto check = [&](std::vector<float>& values, const std::vector<float>& got) {
    for (size_t i = 0; i < values.size(); ++i)
      EXPECT_NEAR(got[i], central_difference(values, i, loss), 2e-4) << i;
  };
  check(a.projected.host, b.d_projected.got());
  check(a.bias.host, b.d_bias.got());
  check(a.class_token.host, b.d_class_token.got());
  check(a.position.host, b.d_position.got());
}

TEST_P(VitTokens, AnyNumberOfThreadsGivesTheSameBits) {
  const Shape s{40, 17, 200};
  expect_same_bits_with_any_threads([&] {
    Backward<float> b(*this, s);
    run(b, s, false);
    return Arrays{b.d_bias.got(), b.d_position.got()};
  });
}

GW_INSTANTIATE_BACKENDS(VitTokens);

}  // namespace
}  // namespace gradwire::testing
