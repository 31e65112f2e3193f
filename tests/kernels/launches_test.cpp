// Each op of the model makes the number of launches given in tests/support/launches.h.
#include "tests/support/launches.h"

#include "kernels/optimizer/optimizer.h"
#include "kernels/vit/vit.h"
#include "tests/kernels/backend.h"

namespace gradwire::testing {
namespace {

class Launches : public OpTest {
 public:
  // Runs run() and compares its number of launches.
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
};
#define GW_EXPECT_LAUNCHES(op, args) expect_launches(#op, [&] { GW_RUN(op, args); })

TEST_P(Launches, LaunchCountsMatchTable) {
  const int64_t tokens = 5, heads = 2, dim = 8, width = heads * dim, rows = 2 * tokens;
  const int64_t pixels = 2 * 2 * 8 * 8;  // images of 8 x 8 in two channels, patches of 4 x 4
  auto floats = [&](int64_t count) { return array(std::vector<float>(static_cast<size_t>(count), 0.5f)); };
  auto x = floats(rows * 4 * width), y = floats(rows * 4 * width), z = floats(rows * 4 * width);
  auto d = floats(rows * 4 * width), sums = floats(rows * 4 * width), workspace = floats(rows * 16 * width);
  auto images = floats(pixels), small = floats(4 * width), other = floats(4 * width);
  auto labels = array(std::vector<int32_t>(CrossEntropy<float>::kOneBlock + 1, 1));
  auto totals = array(std::vector<double>(2, 0.0));
  auto scalars = array(std::vector<OptimizerScalars>(1));

  Patchify<float> patches{
      .images = images.data(), .patches = y.data(), .batch = 2, .channels = 2, .image = 8, .patch = 4};
  GW_EXPECT_LAUNCHES(patchify, patches);
  AssembleTokens<float> assemble{.projected = x.data(),
                                 .bias = small.data(),
                                 .class_token = small.data(),
                                 .position = z.data(),
                                 .x = y.data(),
                                 .batch = 2,
                                 .tokens = tokens,
                                 .width = width};
  GW_EXPECT_LAUNCHES(assemble_tokens, assemble);
  AssembleTokensBackward<float> assembled{.dx = x.data(),
                                          .d_projected = y.data(),
                                          .d_bias = small.data(),
                                          .d_class_token = other.data(),
                                          .d_position = z.data(),
                                          .batch = 2,
                                          .tokens = tokens,
                                          .width = width};
  GW_EXPECT_LAUNCHES(assemble_tokens_backward, assembled);
  LayerNorm<float> norm{.x = x.data(),
                        .gamma = small.data(),
                        .beta = small.data(),
                        .y = y.data(),
                        .mean = z.data(),
                        .rstd = d.data(),
                        .rows = rows,
                        .width = width};
  GW_EXPECT_LAUNCHES(layer_norm, norm);
  LayerNormBackward<float> normed{.x = x.data(),
                                  .dy = y.data(),
                                  .gamma = small.data(),
                                  .mean = z.data(),
                                  .rstd = z.data(),
                                  .dx = d.data(),
                                  .d_gamma = sums.data(),
                                  .d_beta = sums.data() + width,
                                  .workspace = workspace.data(),
                                  .rows = rows,
                                  .width = width};
  GW_EXPECT_LAUNCHES(layer_norm_backward, normed);
  normed.partial_only = true;
  expect_launches("layer_norm_backward, first stage", [&] { GW_RUN(layer_norm_backward, normed); });
  const CombineSums combine{{normed.sums(), normed.sums()}};
  GW_EXPECT_LAUNCHES(combine_sums, combine);
  Attention<float> attend{.qkv = x.data(),
                          .merged = y.data(),
                          .statistics = z.data(),
                          .batch = 2,
                          .tokens = tokens,
                          .heads = heads,
                          .head_dim = dim};
  GW_EXPECT_LAUNCHES(attention, attend);
  AttentionBackward<float> attended{.qkv = x.data(),
                                    .merged = y.data(),
                                    .d_merged = y.data(),
                                    .statistics = z.data(),
                                    .d_qkv = d.data(),
                                    .d_bias = sums.data(),
                                    .workspace = workspace.data(),
                                    .batch = 2,
                                    .tokens = tokens,
                                    .heads = heads,
                                    .head_dim = dim};
  GW_EXPECT_LAUNCHES(attention_backward, attended);
  attended.partial_only = true;
  expect_launches("attention_backward, first stage", [&] { GW_RUN(attention_backward, attended); });
  BiasGelu<float> gelu{.x = x.data(), .y = y.data(), .rows = rows, .width = width};
  GW_EXPECT_LAUNCHES(bias_gelu, gelu);
  BiasGeluBackward<float> gelued{.pre = x.data(),
                                 .dy = d.data(),
                                 .d_pre = d.data(),
                                 .d_bias = sums.data(),
                                 .workspace = workspace.data(),
                                 .rows = rows,
                                 .width = width};
  GW_EXPECT_LAUNCHES(bias_gelu_backward, gelued);
  gelued.partial_only = true;
  expect_launches("bias_gelu_backward, first stage", [&] { GW_RUN(bias_gelu_backward, gelued); });
  BiasResidual<float> residual{
      .y = x.data(), .bias = small.data(), .residual = z.data(), .x = y.data(), .rows = rows, .width = width};
  GW_EXPECT_LAUNCHES(bias_residual, residual);
  ColumnSum<float> sum{
      .x = x.data(), .sum = sums.data(), .workspace = workspace.data(), .rows = rows, .width = width};
  GW_EXPECT_LAUNCHES(column_sum, sum);
  sum.partial_only = true;
  expect_launches("column_sum, first stage", [&] { GW_RUN(column_sum, sum); });
  CrossEntropy<float> loss{.logits = x.data(),
                           .labels = labels.data(),
                           .d_logits = y.data(),
                           .totals = totals.data(),
                           .workspace = workspace.data(),
                           .rows = rows,
                           .classes = width};
  expect_launches("cross_entropy, one block", [&] { GW_RUN(cross_entropy, loss); });
  loss.rows = CrossEntropy<float>::kOneBlock + 1, loss.classes = 2;
  GW_EXPECT_LAUNCHES(cross_entropy, loss);
  SgdStep sgd{.params = x.data(), .grads = y.data(), .count = 100, .scalars = scalars.data()};
  GW_EXPECT_LAUNCHES(sgd_step, sgd);
  AdamWStep adamw{.params = x.data(),
                  .grads = y.data(),
                  .m = z.data(),
                  .v = d.data(),
                  .count = 100,
                  .scalars = scalars.data()};
  GW_EXPECT_LAUNCHES(adamw_step, adamw);
}

GW_INSTANTIATE_BACKENDS(Launches);

}  // namespace
}  // namespace gradwire::testing
