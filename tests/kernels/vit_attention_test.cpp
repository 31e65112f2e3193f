// attention() and attention_backward(), compared with the double reference, and with the chain of products
// and softmax that these ops replace.
#include <fmt/format.h>

#include "kernels/gemm/gemm.h"
#include "kernels/vit/vit.h"
#include "tests/kernels/operand.h"
#include "tests/support/thinned.h"

namespace gradwire::testing {
namespace {

struct Shape {
  int64_t batch, tokens, heads, dim;
  int64_t width() const { return heads * dim; }
  int64_t rows() const { return batch * tokens; }
  std::string name() const { return fmt::format("{}x{} tokens, {} heads of {}", batch, tokens, heads, dim); }
};

// The shapes have whole and partial tiles, select both kernels, and include heads that 16-byte accesses
// cannot read.
const std::vector<Shape> kShapes = {{0, 17, 2, 64}, {2, 1, 2, 64},  {2, 2, 1, 64},  {1, 17, 3, 64},
                                    {2, 50, 2, 64}, {1, 16, 2, 32}, {3, 17, 2, 8},  {2, 10, 3, 8},
                                    {1, 33, 2, 24}, {2, 10, 2, 7},  {1, 19, 1, 37}, {1, 197, 1, 64}};

// The inputs and outputs of one run.
template <typename S>
struct Problem {
  std::vector<S> qkv, d_merged, merged, d_qkv;
  std::vector<float> statistics, d_bias;

  Problem(const Shape& s, uint32_t seed, float scale)
      : qkv(narrowed<S>(normal(s.rows() * 3 * s.width(), seed, scale))),
        d_merged(narrowed<S>(normal(s.rows() * s.width(), seed + 1))),
        merged(d_merged.size()),
        d_qkv(qkv.size()),
        statistics(static_cast<size_t>(2 * s.rows() * s.heads)),
        d_bias(normal(3 * s.width(), seed + 2)) {}

  template <typename Args>
  static Args sized(Args args, const Shape& s) {
    args.batch = s.batch, args.tokens = s.tokens, args.heads = s.heads, args.head_dim = s.dim;
    return args;
  }
  void reference(const Shape& s, bool accumulate) {
    reference::attention(
        sized(Attention<S>{.qkv = qkv.data(), .merged = merged.data(), .statistics = statistics.data()}, s));
    auto backward = sized(AttentionBackward<S>{.qkv = qkv.data(),
                                               .merged = merged.data(),
                                               .d_merged = d_merged.data(),
                                               .d_qkv = d_qkv.data(),
                                               .d_bias = d_bias.data()},
                          s);
    backward.accumulate = accumulate;
    reference::attention_backward(backward);
  }
};

class VitAttention : public OpTest {
 public:
  template <typename S>
  Problem<S> run(const Shape& s, Problem<S> in, bool accumulate, int64_t misalign, bool in_place = false) {
    auto qkv = array(in.qkv, misalign), d_merged = array(in.d_merged, misalign);
    auto merged = array<S>(static_cast<int64_t>(in.merged.size()), misalign);
    auto other = array<S>(static_cast<int64_t>(in.d_qkv.size()), misalign);
    auto& d_qkv = in_place ? qkv : other;
    auto statistics = array<float>(static_cast<int64_t>(in.statistics.size()), misalign);
    auto d_bias = array(in.d_bias, misalign);
    auto workspace = array<float>(attention_backward_workspace(s.batch, s.tokens, s.width()), misalign);
    auto forward = Problem<S>::sized(
        Attention<S>{.qkv = qkv.data(), .merged = merged.data(), .statistics = statistics.data()}, s);
    GW_RUN(attention, forward);
    auto backward = Problem<S>::sized(AttentionBackward<S>{.qkv = qkv.data(),
                                                           .merged = merged.data(),
                                                           .d_merged = d_merged.data(),
                                                           .statistics = statistics.data(),
                                                           .d_qkv = d_qkv.data(),
                                                           .d_bias = d_bias.data(),
                                                           .workspace = workspace.data()},
                                      s);
    backward.accumulate = accumulate;
    GW_RUN(attention_backward, backward);
    merged.expect_guards_intact("merged");
    d_qkv.expect_guards_intact("d_qkv");
    statistics.expect_guards_intact("statistics");
    d_bias.expect_guards_intact("d_bias");
    workspace.expect_guards_intact("workspace");
    in.merged = merged.host(), in.d_qkv = d_qkv.host();
    in.statistics = statistics.host(), in.d_bias = d_bias.host();
    return in;
  }
  // Compares results with the reference's rounded results for the same operands.
  template <typename S>
  void expect_reference(double tolerance, double sums_tolerance) {
    for (const Shape& s : kShapes) {
      // The largest shape in FP32 needs more shared memory than sm_80 has.
      if (!GetParam().device.is_host() && !fuses_attention<S>(GetParam().device, s.tokens, s.dim)) continue;
      for (int64_t misalign : {0, 1}) {
        if (misalign != 0 && s.tokens > 100) continue;  // shapes with fewer tokens cover misalignment
        SCOPED_TRACE(fmt::format("{} misaligned by {}", s.name(), misalign));
        const bool accumulate = misalign != 0;
        Problem<S> want(s, 3, 1.5f);
        const Problem<S> got = run(s, want, accumulate, misalign);
        want.reference(s, accumulate);
        expect_close(widened(got.merged), widened(want.merged), tolerance, "merged");
        expect_close(widened(got.d_qkv), widened(want.d_qkv), tolerance, "d_qkv");
        expect_close(got.statistics, want.statistics, 1e-5, "statistics");
        expect_close(got.d_bias, want.d_bias, sums_tolerance, "d_bias", 4.0);
      }
    }
  }
};

// Heads of 64 elements in BF16 have kernels for at most 64 tokens, one for each number of tiles.
TEST_P(VitAttention, ShortSequencesOfAnyLengthAreWithinTheirRoundingError) {
  for (int64_t tokens = 1; tokens <= 65; ++tokens) {
    const Shape s{1 + tokens % 2, tokens, 1 + tokens % 3, 64};
    SCOPED_TRACE(s.name());
    Problem<Bf16> want(s, static_cast<uint32_t>(tokens), 1.0f);
    const Problem<Bf16> got = run(s, want, true, 0);
    want.reference(s, true);
    expect_close(widened(got.merged), widened(want.merged), 3e-2, "merged");
    expect_close(widened(got.d_qkv), widened(want.d_qkv), 3e-2, "d_qkv");
    expect_close(got.statistics, want.statistics, 1e-5, "statistics");
    expect_close(got.d_bias, want.d_bias, 3e-2, "d_bias", 4.0);
  }
}

TEST_P(VitAttention, MatchesTheDoubleReference) {
  // The error is 4e-6 with fused multiply-adds. Sanitizer builds also round each product.
  expect_reference<float>(1e-5, 1e-5);
}

template <typename S>
void expect_same_bits_in_place(VitAttention& test) {
  for (const Shape& s : thinned(kShapes, 7)) {
    if (s.tokens > 100 && sizeof(S) == sizeof(float)) continue;  // BF16 covers the large shapes
    for (int64_t misalign : {0, 1}) {
      if (misalign != 0 && s.tokens > 17) continue;
      SCOPED_TRACE(fmt::format("{} misaligned by {}", s.name(), misalign));
      const Problem<S> in(s, 5, 1.5f);
      const auto want = test.run(s, in, true, misalign), got = test.run(s, in, true, misalign, true);
      expect_same_bits(widened(got.d_qkv), widened(want.d_qkv), "d_qkv");
      expect_same_bits(got.d_bias, want.d_bias, "d_bias");
    }
  }
}

TEST_P(VitAttention, GradientMayOverwriteQkv) {
  expect_same_bits_in_place<float>(*this);
  expect_same_bits_in_place<Bf16>(*this);
}

// Allows for two roundings of 2^-9 each, of values of order 1: weights before they are multiplied, and
// results when they are stored.
TEST_P(VitAttention, Bf16IsWithinItsRoundingError) {
  expect_reference<Bf16>(3e-2, 3e-2);
}

// Runs the chain that the ops replace on the same operands: products, softmax, splitting and merging of
// heads. Each op rounds its output.
template <typename S>
Problem<S> by_parts(const Shape& s, Problem<S> in) {
  const int64_t padded = (s.tokens + 7) / 8 * 8, matrices = s.batch * s.heads;
  std::vector<S> q(in.merged.size()), k(q), v(q), heads(q), dq(q), dk(q), dv(q);
  std::vector<S> weights(matrices * s.tokens * padded), d_weights(weights);
  std::vector<float> scores(weights.size());
  auto sized = [&](auto args) { return Problem<S>::sized(args, s); };
  reference::split_heads(sized(Heads<S>{.rows = in.qkv.data(), .parts = {q.data(), k.data(), v.data()}}));
  auto product = [&](bool transpose_a, bool transpose_b, int64_t n, int64_t inner, const S* a, int64_t lda,
                     const S* b, int64_t ldb, MatrixPointer<void> c, int64_t ldc) {
    Gemm g;
    g.transpose_a = transpose_a, g.transpose_b = transpose_b;
    g.m = s.tokens, g.n = n, g.k = inner;
    g.a = a, g.lda = lda, g.stride_a = s.tokens * lda;
    g.b = b, g.ldb = ldb, g.stride_b = s.tokens * ldb;
    g.c = c, g.ldc = ldc, g.stride_c = s.tokens * ldc;
    g.batch = matrices;
    reference::gemm(g);
  };
  product(false, true, s.tokens, s.dim, q.data(), s.dim, k.data(), s.dim, scores.data(), padded);
  const float scale = attention_scale(s.dim);
  reference::softmax(Softmax<S>{.x = scores.data(),
                                .y = weights.data(),
                                .rows = matrices * s.tokens,
                                .width = s.tokens,
                                .ld = padded,
                                .scale = scale});
  product(false, false, s.dim, s.tokens, weights.data(), padded, v.data(), s.dim, heads.data(), s.dim);
  reference::merge_heads(sized(Heads<S>{.rows = in.merged.data(), .parts = {heads.data()}}));
  reference::split_heads(sized(Heads<S>{.rows = in.d_merged.data(), .parts = {heads.data()}}));
  product(true, false, s.dim, s.tokens, weights.data(), padded, heads.data(), s.dim, dv.data(), s.dim);
  product(false, true, s.tokens, s.dim, heads.data(), s.dim, v.data(), s.dim, d_weights.data(), padded);
  reference::softmax_backward(SoftmaxBackward<S>{.y = weights.data(),
                                                 .dy = d_weights.data(),
                                                 .rows = matrices * s.tokens,
                                                 .width = s.tokens,
                                                 .ld = padded,
                                                 .scale = scale});
  product(false, false, s.dim, s.tokens, d_weights.data(), padded, k.data(), s.dim, dq.data(), s.dim);
  product(true, false, s.dim, s.tokens, d_weights.data(), padded, q.data(), s.dim, dk.data(), s.dim);
  reference::merge_heads(
      sized(Heads<S>{.rows = in.d_qkv.data(), .parts = {dq.data(), dk.data(), dv.data()}}));
  return in;
}

double distance(const std::vector<float>& a, const std::vector<float>& b) {
  double sum = 0.0;
  for (size_t i = 0; i < a.size(); ++i)
    sum += (static_cast<double>(a[i]) - b[i]) * (static_cast<double>(a[i]) - b[i]);
  return std::sqrt(sum);
}

TEST_P(VitAttention, Bf16IsAboutAsAccurateAsTheUnfusedChain) {
  for (const Shape& s :
       {Shape{2, 2, 1, 64}, Shape{1, 17, 3, 64}, Shape{2, 50, 2, 64}, Shape{1, 100, 1, 32}}) {
    SCOPED_TRACE(s.name());
    const Problem<Bf16> start(s, 9, 1.5f), got = run(s, start, false, 0), parts = by_parts(s, start);
    Problem<float> exact(s, 9, 1.5f);
    exact.qkv = widened(start.qkv), exact.d_merged = widened(start.d_merged);
    exact.reference(s, false);
    EXPECT_LE(distance(widened(got.merged), exact.merged),
              1.5 * distance(widened(parts.merged), exact.merged));
    EXPECT_LE(distance(widened(got.d_qkv), exact.d_qkv), 1.5 * distance(widened(parts.d_qkv), exact.d_qkv));
  }
}

template <typename S>
void expect_one_key_selected(VitAttention& test, int64_t dim) {
  const Shape s{1, 20, 1, dim};
  Problem<S> in(s, 5, 1.0f);
  // Query i and key i are large and point in the same direction. The directions for different i differ as far
  // as eight dimensions allow.
  for (int64_t t = 0; t < s.tokens; ++t) {
    for (int64_t d = 0; d < dim; ++d) {
      in.qkv[t * 3 * dim + d] = narrow<S>(d == t % 8 ? 1e4f : 0.0f);
      in.qkv[t * 3 * dim + dim + d] = narrow<S>(d == t % 8 && t < 8 ? 1e4f : 0.0f);
    }
  }
  const Problem<S> got = test.run(s, in, false, 0);
  for (int64_t t = 0; t < s.tokens; ++t) {
    for (int64_t d = 0; d < dim; ++d) {
      // A BF16 weight of the largest score may differ from 1 by a rounding.
      const float want = widen(in.qkv[(t % 8 * 3 + 2) * dim + d]);
      EXPECT_NEAR(widen(got.merged[t * dim + d]), want, sizeof(S) == 2 ? std::abs(want) / 128 : 0.0f);
    }
  }
  for (S x : got.d_qkv) EXPECT_TRUE(std::isfinite(widen(x)));
}

TEST_P(VitAttention, HugeScoresStayFiniteAndSelectOneKey) {
  expect_one_key_selected<float>(*this, 8);
  expect_one_key_selected<Bf16>(*this, 64);
}

template <typename S>
void expect_nan_confined(VitAttention& test, int64_t dim) {
  const Shape s{2, 18, 2, dim};
  const auto width = static_cast<size_t>(s.width()), head = static_cast<size_t>(dim);
  Problem<S> in(s, 6, 1.0f);
  // The NaN is in a query of image 0, head 0.
  in.qkv[4 * 3 * width + 3] = narrow<S>(std::numeric_limits<float>::quiet_NaN());
  const Problem<S> got = test.run(s, in, false, 0);
  for (size_t i = 0; i < got.merged.size(); ++i)
    EXPECT_EQ(std::isnan(widen(got.merged[i])), i / width == 4 && i % width < head) << i;
  for (size_t i = 0; i < got.d_qkv.size(); ++i) {
    if (i / (3 * width) >= 18 || i % width >= head) {
      EXPECT_FALSE(std::isnan(widen(got.d_qkv[i]))) << i;
    }
  }
  EXPECT_TRUE(std::isnan(got.d_bias[0]));
}

TEST_P(VitAttention, NanStaysInItsHeadAndImage) {
  expect_nan_confined<float>(*this, 8);
  expect_nan_confined<Bf16>(*this, 64);
}

TEST_P(VitAttention, BackwardIsTheDerivativeOfForward) {
  const Shape s{1, 5, 2, 4};
  Problem<float> in(s, 7, 0.8f);
  const Problem<float> got = run(s, in, false, 0);
  std::vector<float>& x = in.qkv;
  auto loss = [&] {
    reference::attention(Problem<float>::sized(
        Attention<float>{.qkv = x.data(), .merged = in.merged.data(), .statistics = in.statistics.data()},
        s));
    return dot(in.merged, in.d_merged);
  };
  for (size_t i = 0; i < x.size(); ++i) EXPECT_NEAR(got.d_qkv[i], central_difference(x, i, loss), 2e-4) << i;
}

TEST_P(VitAttention, AnyNumberOfThreadsGivesTheSameBits) {
  const Shape s{3, 17, 4, 16};
  expect_same_bits_with_any_threads([&] {
    const Problem<float> got = run(s, Problem<float>(s, 8, 1.0f), false, 0);
    return Arrays{got.merged, got.d_qkv, got.d_bias};
  });
}

GW_INSTANTIATE_BACKENDS(VitAttention);

}  // namespace
}  // namespace gradwire::testing
