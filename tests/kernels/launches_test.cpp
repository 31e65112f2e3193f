// Tests that each op of the model makes the number of launches given in tests/support/launches.h.
#include "tests/support/launches.h"

#include "kernels/passes/passes.h"
#include "kernels/vit/vit.h"
#include "tests/kernels/backend.h"

namespace gradwire::testing {
namespace {

class Launches : public OpTest {
 public:
  // Calls run() and compares the number of launches with the number for `op`.
  template <typename Run>
  void expect_launches(const char* op, const Run& run) {
    const OpCount count;
    run();
    if (!GetParam().simt && GetParam().device.is_host()) {
      EXPECT_EQ(count.ops().at(op), 1);
      EXPECT_TRUE(count.launches().empty()) << op;
    } else {
      EXPECT_EQ(OpCount::total(count.launches()), cuda_launches(op)) << op;
    }
  }

  static constexpr int64_t kTokens = 5, kHeads = 2, kDim = 8, kWidth = kHeads * kDim, kRows = 2 * kTokens;
  template <typename Args>
  static Args rows_of(Args args) {
    args.rows = kRows, args.width = kWidth;
    return args;
  }
  template <typename Args>
  static Args tokens_of(Args args) {
    args.batch = 2, args.tokens = kTokens, args.width = kWidth;
    return args;
  }
  template <typename Args>
  static Args heads_of(Args args) {
    args.batch = 2, args.tokens = kTokens, args.heads = kHeads, args.head_dim = kDim;
    return args;
  }

  Array<float> floats(int64_t count) { return array(std::vector<float>(static_cast<size_t>(count), 0.5f)); }
  Array<float> arrays[5] = {floats(kRows * 4 * kWidth), floats(kRows * 4 * kWidth),
                            floats(kRows * 4 * kWidth), floats(kRows * 4 * kWidth),
                            floats(kRows * 4 * kWidth)};
  Array<float> work = floats(kRows * 16 * kWidth), vectors[2] = {floats(4 * kWidth), floats(4 * kWidth)};
  float *x = arrays[0].data(), *y = arrays[1].data(), *z = arrays[2].data(), *d = arrays[3].data(),
        *sums = arrays[4].data(), *workspace = work.data(), *small = vectors[0].data(),
        *other = vectors[1].data();
};
#define GW_EXPECT_LAUNCHES(op, args) expect_launches(#op, [&] { GW_RUN(op, args); })
#define GW_EXPECT_FIRST_STAGE(op, args) expect_launches(#op ", first stage", [&] { GW_RUN(op, args); })

TEST_P(Launches, OfTokensMatchTheTable) {
  auto images = floats(2 * 2 * 8 * 8);  // two-channel images of 8 x 8, in patches of 4 x 4
  Patchify<float> patches{
      .images = images.data(), .patches = y, .batch = 2, .channels = 2, .image = 8, .patch = 4};
  GW_EXPECT_LAUNCHES(patchify, patches);
  auto assemble = tokens_of(
      AssembleTokens<float>{.projected = x, .bias = small, .class_token = small, .position = z, .x = y});
  GW_EXPECT_LAUNCHES(assemble_tokens, assemble);
  auto assembled = tokens_of(AssembleTokensBackward<float>{.dx = x,
                                                           .d_projected = y,
                                                           .d_bias = small,
                                                           .d_class_token = other,
                                                           .d_position = z,
                                                           .workspace = workspace});
  GW_EXPECT_LAUNCHES(assemble_tokens_backward, assembled);
}

TEST_P(Launches, OfLayersMatchTheTable) {
  auto norm = rows_of(LayerNorm<float>{.x = x, .gamma = small, .beta = small, .y = y, .mean = z, .rstd = d});
  GW_EXPECT_LAUNCHES(layer_norm, norm);
  auto normed = rows_of(LayerNormBackward<float>{.x = x,
                                                 .dy = y,
                                                 .gamma = small,
                                                 .mean = z,
                                                 .rstd = z,
                                                 .dx = d,
                                                 .d_gamma = sums,
                                                 .d_beta = sums + kWidth,
                                                 .workspace = workspace});
  GW_EXPECT_LAUNCHES(layer_norm_backward, normed);
  normed.partial_only = true;
  GW_EXPECT_FIRST_STAGE(layer_norm_backward, normed);
  const CombineSums combine{{normed.sums(), normed.sums()}};
  GW_EXPECT_LAUNCHES(combine_sums, combine);
  auto attend = heads_of(Attention<float>{.qkv = x, .merged = y, .statistics = z});
  GW_EXPECT_LAUNCHES(attention, attend);
  auto attended = heads_of(AttentionBackward<float>{.qkv = x,
                                                    .merged = y,
                                                    .d_merged = y,
                                                    .statistics = z,
                                                    .d_qkv = d,
                                                    .d_bias = sums,
                                                    .workspace = workspace});
  GW_EXPECT_LAUNCHES(attention_backward, attended);
  attended.partial_only = true;
  GW_EXPECT_FIRST_STAGE(attention_backward, attended);
  auto gelu = rows_of(BiasGelu<float>{.x = x, .y = y});
  GW_EXPECT_LAUNCHES(bias_gelu, gelu);
  auto gelued =
      rows_of(BiasGeluBackward<float>{.pre = x, .dy = d, .d_pre = d, .d_bias = sums, .workspace = workspace});
  GW_EXPECT_LAUNCHES(bias_gelu_backward, gelued);
  gelued.partial_only = true;
  GW_EXPECT_FIRST_STAGE(bias_gelu_backward, gelued);
  auto sum = rows_of(ColumnSum<float>{.x = x, .sum = sums, .workspace = workspace});
  GW_EXPECT_LAUNCHES(column_sum, sum);
  sum.partial_only = true;
  GW_EXPECT_FIRST_STAGE(column_sum, sum);
}

TEST_P(Launches, OfLossAndOptimizersMatchTheTable) {
  auto labels = array(std::vector<int32_t>(CrossEntropy<float>::kOneBlock + 1, 1));
  auto totals = array(std::vector<double>(2, 0.0));
  auto scalars = array(std::vector<OptimizerScalars>(1));
  CrossEntropy<float> loss{.logits = x,
                           .labels = labels.data(),
                           .d_logits = y,
                           .totals = totals.data(),
                           .workspace = workspace,
                           .rows = kRows,
                           .classes = kWidth};
  expect_launches("cross_entropy, one block", [&] { GW_RUN(cross_entropy, loss); });
  loss.rows = 1, loss.classes = 257;  // not in fours, and more than a warp holds one by one
  GW_EXPECT_LAUNCHES(cross_entropy, loss);
  loss.rows = CrossEntropy<float>::kOneBlock + 1, loss.classes = 2;
  GW_EXPECT_LAUNCHES(cross_entropy, loss);
  SgdStep sgd{.params = x, .grads = y, .count = 100, .scalars = scalars.data()};
  GW_EXPECT_LAUNCHES(sgd_step, sgd);
  AdamWStep adamw{.params = x, .grads = y, .m = z, .v = d, .count = 100, .scalars = scalars.data()};
  GW_EXPECT_LAUNCHES(adamw_step, adamw);
}

GW_INSTANTIATE_BACKENDS(Launches);

}  // namespace
}  // namespace gradwire::testing
