// The model's parameters: counts, layout and initialization.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <set>
#include <string>
#include <vector>

#include "runtime/threads/thread_pool.h"
#include "tests/trainer/runs.h"
#include "trainer/model/vit.h"

namespace gradwire {
namespace {

TEST(VitParameters, CountsAndTensorsMatchTorchvision) {
  struct Known {
    const char* name;
    int64_t parameters;
    size_t tensors;
  };
  for (const Known& known : {Known{"vit_l_32", 306535400, 296}, Known{"vit_b_16", 86567656, 152},
                             Known{"vit_b_32", 88224232, 152}}) {
    std::vector<VitParameter> parameters = vit_parameters(named_model(known.name));
    EXPECT_EQ(count_elements(parameters), known.parameters) << known.name;
    EXPECT_EQ(parameters.size(), known.tensors) << known.name;
  }
}

TEST(VitParameters, TrainingFlopsMatchThePublishedModels) {
  EXPECT_NEAR(training_flops_per_image(named_model("vit_l_32")), 91.96e9, 0.005e9);
  EXPECT_NEAR(training_flops_per_image(named_model("vit_b_16")), 105.15e9, 0.005e9);
  // The parameters of this model were counted by hand: one patch of one pixel, so two tokens; width 1, one
  // layer, MLP 1, one class.
  VitConfig unit{.name = "unit",
                 .image = 1,
                 .channels = 1,
                 .patch = 1,
                 .width = 1,
                 .depth = 1,
                 .heads = 1,
                 .mlp = 1,
                 .classes = 1};
  EXPECT_EQ(training_flops_per_image(unit), 2 * (3 * (2 * 4 + 2 * 2 * 2 + 2 * 2) + 2 + 3));
}

TEST(VitParameters, LayoutSeparatesAndAlignsTensors) {
  VitConfig config = testing::small_model();
  config.classes = 5;  // a head bias of 5 floats leaves a gap
  std::vector<VitParameter> parameters = vit_parameters(config);
  ParameterLayout layout = packed_layout(parameters);
  std::set<std::string> names;
  for (size_t i = 0; i < parameters.size(); ++i) {
    EXPECT_EQ(layout.offsets[i] % 4, 0);
    int64_t end = i + 1 < parameters.size() ? layout.offsets[i + 1] : layout.elements;
    EXPECT_LE(layout.offsets[i] + parameters[i].elements(), end);
    names.insert(parameters[i].name);
  }
  EXPECT_EQ(names.size(), parameters.size());
  EXPECT_GT(layout.elements, count_elements(parameters));
}

TEST(VitInitialization, MatchesTorchvisionsDistributions) {
  VitConfig config = named_model("vit_s_16");
  config.depth = 1;
  std::vector<VitParameter> parameters = vit_parameters(config);
  ParameterLayout layout = packed_layout(parameters);
  std::vector<float> values(layout.elements, -7.0f);
  vit_initialize(parameters, layout, 3, values);
  struct Moments {
    double mean, deviation, most;
  };
  auto moments = [&](const std::string& name) {
    size_t i = static_cast<size_t>(testing::index_of(parameters, name));
    double n = static_cast<double>(parameters[i].elements()), sum = 0, squares = 0, most = 0;
    for (int64_t j = 0; j < parameters[i].elements(); ++j) {
      double v = values[layout.offsets[i] + j];
      sum += v, squares += v * v, most = std::max(most, std::abs(v));
    }
    return Moments{sum / n, std::sqrt(squares / n - sum / n * sum / n), most};
  };
  auto expect_all = [&](const std::string& name, double value) {
    Moments m = moments(name);
    EXPECT_EQ(m.mean, value) << name;
    EXPECT_EQ(m.most, std::abs(value)) << name;
  };
  auto expect_normal = [&](const std::string& name, double deviation) {
    Moments m = moments(name);
    EXPECT_NEAR(m.mean, 0, 0.15 * deviation) << name;
    EXPECT_NEAR(m.deviation, deviation, 0.1 * deviation) << name;
    EXPECT_GT(m.most, 2.2 * deviation) << name;  // wider than any uniform distribution
  };
  auto expect_uniform = [&](const std::string& name, double bound) {
    Moments m = moments(name);
    EXPECT_NEAR(m.mean, 0, 0.01 * bound) << name;
    EXPECT_NEAR(m.deviation, bound / std::sqrt(3.0), 0.01 * bound) << name;
    EXPECT_LE(m.most, bound * (1 + 1e-6)) << name;
    EXPECT_GT(m.most, 0.99 * bound) << name;
  };
  const double c = config.width, f = config.mlp;
  const std::string layer = "encoder.layers.encoder_layer_0.";
  for (const char* zero :
       {"class_token", "conv_proj.bias", "heads.head.weight", "heads.head.bias", "encoder.ln.bias"}) {
    expect_all(zero, 0);
  }
  expect_all("encoder.ln.weight", 1);
  expect_all(layer + "ln_1.weight", 1);
  expect_all(layer + "ln_2.bias", 0);
  expect_all(layer + "self_attention.in_proj_bias", 0);
  expect_all(layer + "self_attention.out_proj.bias", 0);
  expect_normal("encoder.pos_embedding", 0.02);
  expect_normal("conv_proj.weight", std::sqrt(1.0 / (3.0 * 16 * 16)));
  expect_normal(layer + "mlp.0.bias", 1e-6);
  expect_normal(layer + "mlp.3.bias", 1e-6);
  expect_uniform(layer + "self_attention.in_proj_weight", std::sqrt(6.0 / (3 * c + c)));
  expect_uniform(layer + "self_attention.out_proj.weight", 1 / std::sqrt(c));
  expect_uniform(layer + "mlp.0.weight", std::sqrt(6.0 / (c + f)));
  expect_uniform(layer + "mlp.3.weight", std::sqrt(6.0 / (c + f)));
}

TEST(VitInitialization, DependsOnlyOnTheSeed) {
  std::vector<VitParameter> parameters = vit_parameters(testing::small_model());
  ParameterLayout layout = packed_layout(parameters);
  auto draw = [&](uint64_t seed, int threads) {
    const int before = host_threads();
    set_host_threads(threads);
    std::vector<float> values(layout.elements);
    vit_initialize(parameters, layout, seed, values);
    set_host_threads(before);
    return values;
  };
  EXPECT_EQ(draw(1, 1), draw(1, 3));
  EXPECT_NE(draw(1, 1), draw(2, 1));
}

TEST(VitInitialization, TruncatedNormalStaysWithinTwo) {
  // One pixel per patch gives a standard deviation of 1, so one draw in twenty is repeated.
  VitParameter parameter{"conv", {4000}, VitParameter::Init::truncated_normal, 1.0};
  ParameterLayout layout = packed_layout({parameter});
  std::vector<float> values(4000);
  vit_initialize({parameter}, layout, 1, values);
  auto [low, high] = std::minmax_element(values.begin(), values.end());
  EXPECT_GE(*low, -2.0f);
  EXPECT_LE(*high, 2.0f);
  EXPECT_GT(*high, 1.9f);
  double squares = 0;
  for (float v : values) squares += double(v) * v;
  // Deviation of a normal distribution truncated at two standard deviations.
  EXPECT_NEAR(std::sqrt(squares / 4000), 0.88, 0.03);
}

}  // namespace
}  // namespace gradwire
