// The budget of launches per training step on CUDA. Each launch costs the host a few microseconds, and leaves
// the GPU idle between kernels.
#include "tests/support/launches.h"

#include <gtest/gtest.h>

#include "runtime/device/graph.h"
#include "trainer/model/vit.h"
#include "trainer/train/optimizer_state.h"
#include "trainer/train/weight_shards.h"

namespace gradwire::testing {
namespace {

// Returns the ops that a rank enqueues for a step on CUDA: both passes and the optimizer, without the
// reducer. The ops depend on the model's depth, not on its widths. So the function captures a narrow model on
// the host, without computing.
OpCount::ByName step_ops(const char* model, Precision precision, GradientGroups groups,
                         Gelu gelu = Gelu::exact) {
  TrainConfig config;
  config.model = named_model(model);
  config.precision = precision;
  VitConfig narrow = config.model;
  narrow.width = 16, narrow.heads = 2, narrow.mlp = 8, narrow.classes = 2;
  narrow.gelu = gelu;
  const Device host = Device::host();
  const Stream stream = Stream::create(host, "launches");
  const ParameterLayout layout = packed_layout(vit_parameters(narrow));
  Vit vit(narrow, stream, layout,
          {.max_batch = 1,
           .precision = config.precision,
           .fused_attention = true,
           .fused_gelu = fuses_gelu(Device::cuda(0), narrow),
           .groups = groups});
  Optimizer optimizer(config, stream, {{0, layout.elements}});
  const Buffer images = make_buffer<float>(host, int64_t{narrow.channels} * narrow.image * narrow.image),
               gradients = make_buffer<float>(host, layout.elements), labels = make_buffer<int32_t>(host, 1),
               totals = make_buffer<double>(host, 2);
  stream.synchronize();
  const OpCount count;
  const Graph never_launched = Graph::capture(stream, [&] {
    vit.forward(images.as<float>(), 1);
    vit.backward(labels.as<int32_t>(), totals.as<double>(), 1.0f, gradients.as<float>(), false, {});
    optimizer.step(stream, {vit.weights().as<float>()}, {gradients.as<const float>()}, vit.rounded_weights());
  });
  return count.ops();
}

std::string listed(const OpCount::ByName& ops) {
  std::string text;
  for (const auto& [op, calls] : ops)
    text += op + ": " + std::to_string(calls) + " calls, " + std::to_string(calls * cuda_launches(op)) +
            " launches\n";
  return text;
}

GradientGroups groups_of(int ranks, int64_t layers = TrainConfig{}.gradient_group) {
  TrainConfig config;
  config.gradient_group = layers;
  return gradient_groups(config, Device::cuda(0), ranks);
}

// Checks the budget of ViT-L/32. docs/results/launches.md lists the launches.
TEST(Launches, AStepOfVitL32StaysWithinItsBudget) {
  for (Precision precision : {Precision::fp32, Precision::bf16}) {
    const OpCount::ByName ops = step_ops("vit_l_32", precision, groups_of(1));
    EXPECT_LE(cuda_launches(ops), 413) << listed(ops);
    // Each layer has 4 products in forward and 4 products in backward, and eight layers share 4 products of
    // weight gradients.
    EXPECT_EQ(ops.at("gemm"), 8 * 24 + 4 * 3 + 5) << listed(ops);
    EXPECT_EQ(ops.at("attention"), 24);
    EXPECT_EQ(ops.at("attention_backward, first stage"), 24);
    EXPECT_EQ(ops.at("combine_sums"), 3);
  }
}

TEST(Launches, TwoLayersShareLaunchesWhenGradientsAreExchanged) {
  for (Precision precision : {Precision::fp32, Precision::bf16}) {
    const OpCount::ByName ops = step_ops("vit_l_32", precision, groups_of(2));
    EXPECT_LE(cuda_launches(ops), 466) << listed(ops);
    // The last two layers of backward compute their weight gradients separately.
    EXPECT_EQ(ops.at("gemm"), 8 * 24 + 4 * 11 + 4 * 2 + 5) << listed(ops);
    EXPECT_EQ(ops.at("attention_backward, first stage"), 23);
    EXPECT_EQ(ops.at("attention_backward"), 1);  // no later work hides the exchange of the last layer
  }
}

// Checks the budget where cuBLASLt supports GELU in products (tests/kernels/gemm_test.cpp). Elsewhere, a
// product with GELU takes two launches instead of one launch.
TEST(Launches, AStepWithTheTanhFormOfGeluStaysWithinItsBudget) {
  for (Precision precision : {Precision::fp32, Precision::bf16}) {
    const OpCount::ByName alone = step_ops("vit_l_32", precision, groups_of(1), Gelu::tanh);
    EXPECT_LE(cuda_launches(alone), 368) << listed(alone);
    EXPECT_EQ(alone.at("gemm"), 8 * 24 + 4 * 3 + 5) << listed(alone);
    EXPECT_EQ(alone.at("column_sum, first stage"), 3) << "of mlp.0's biases, one per group";
    const OpCount::ByName exchanged = step_ops("vit_l_32", precision, groups_of(2), Gelu::tanh);
    EXPECT_LE(cuda_launches(exchanged), 431) << listed(exchanged);
    for (const char* op : {"bias_gelu", "bias_gelu_backward", "bias_gelu_backward, first stage"}) {
      EXPECT_FALSE(alone.contains(op)) << op;
      EXPECT_FALSE(exchanged.contains(op)) << op;
    }
  }
}

TEST(Launches, AStepWithGroupsOfFourLayersThatExchangesGradientsStaysWithinItsBudget) {
  for (Precision precision : {Precision::fp32, Precision::bf16}) {
    const OpCount::ByName tanh = step_ops("vit_l_32", precision, groups_of(2, 4), Gelu::tanh);
    EXPECT_LE(cuda_launches(tanh), 401) << listed(tanh);
    EXPECT_EQ(tanh.at("gemm"), 8 * 24 + 4 * 8 + 5) << "of 4, 4, 4, 4, 4, 2, 1 and 1 layers: " << listed(tanh);
    const OpCount::ByName exact = step_ops("vit_l_32", precision, groups_of(2, 4));
    EXPECT_LE(cuda_launches(exact), 441) << listed(exact);
  }
}

TEST(Launches, LaunchesPerLayerMatchTheDocumentation) {
  auto of_twelve_layers = [](GradientGroups groups) {
    return cuda_launches(step_ops("vit_l_32", Precision::bf16, groups)) -
           cuda_launches(step_ops("vit_b_32", Precision::bf16, groups));
  };
  EXPECT_EQ(of_twelve_layers({}), 12 * 21);
  EXPECT_EQ(of_twelve_layers(groups_of(2)), 12 * 16 + 6 * 5);
}

}  // namespace
}  // namespace gradwire::testing
