// --compression auto: its request, its choice from given measurements, and the error that it measures.
#include "trainer/measure/recommend.h"

#include <fmt/format.h>
#include <fnmatch.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>

#include "collectives/codec/codec.h"
#include "collectives/communicator/communicator.h"
#include "tests/support/expect.h"
#include "tests/trainer/files.h"
#include "trainer/log/console.h"
#include "trainer/measure/peaks.h"
#include "trainer/measure/ranks.h"
#include "trainer/model/parameters.h"

namespace gradwire::testing {
namespace {

TEST(AutoCompression, ParsesItsOptions) {
  EXPECT_TRUE(AutoCompression::is_request("auto") && AutoCompression::is_request("auto:error=1"));
  EXPECT_FALSE(AutoCompression::is_request("int8") || AutoCompression::is_request("automatic"));
  EXPECT_EQ(AutoCompression::parse("auto").to_string(), "auto:error=0.1");
  const std::string text = "auto:error=0.02,allow=bf16+int4:block=64,round=stochastic+fp32";
  const AutoCompression request = AutoCompression::parse(text);
  EXPECT_EQ(request.error, 0.02);
  EXPECT_EQ(AutoCompression::parse(request.to_string()).to_string(), request.to_string());
  const Choices choices = request.choices({25});
  ASSERT_EQ(choices.specs.size(), 3u);  // FP32 is first, and once
  EXPECT_EQ(choices.specs[0], "fp32");
  EXPECT_EQ(choices.specs[2], CompressionSpec::parse("int4:block=64,round=stochastic").to_string());
  EXPECT_TRUE(request.replan);
  EXPECT_EQ(AutoCompression::parse("auto:replan=off,error=1,allow=int8").to_string(),
            "auto:error=1,replan=off,allow=int8");
  EXPECT_EQ(AutoCompression::parse("auto:plan=a/b.json,allow=bf16").plan, "a/b.json");
  EXPECT_EQ(AutoCompression::parse("auto:allow=int8").error, AutoCompression().error);
}

TEST(AutoCompression, RejectsInvalidRequests) {
  for (const auto& [text, culprit] : {std::pair{"auto:", "''"},
                                      {"auto:erorr=1", "erorr=1"},
                                      {"auto:replan=of", "replan=of"},
                                      {"auto:plan=,error=1", "plan="},
                                      {"auto:error=-1", "'-1'"},
                                      {"auto:error=nan", "'nan'"},
                                      {"auto:error=0.1,", "''"},
                                      {"auto:error=0.1,error=0.1", "twice"},
                                      {"auto:allow=", "empty"},
                                      {"auto:allow=int8+int8", "twice"},
                                      {"auto:allow=int8:start=5", "start="},
                                      {"auto:allow=topk:momentum=0.9", "momentum="},
                                      {"auto:allow=dion:rank=2", "optimizer"},
                                      {"auto:allow=int9", "int9"}}) {
    expect_bad_input([text = text] { AutoCompression::parse(text); }, {culprit});
  }
}

// Returns the costs of vit_b_32 on 4 devices that take 100 ms for a batch, with typical errors.
StepCosts measured(double bytes_per_us, double latency_us = 20) {
  StepCosts costs;
  for (const VitParameter& p : vit_parameters(named_model("vit_b_32")))
    costs.tensors.push_back({p.name, p.shape});
  costs.world = 4;
  costs.links.measured = true;
  costs.links.neighbour = costs.links.all_pairs = costs.links.intra_node =
      costs.links.inter_node = {latency_us, bytes_per_us};
  costs.compute_ms = 100;
  costs.optimizer_ms = 2;
  for (const std::string& spec : candidate_specs()) {
    costs.codec_ns[spec] = spec == "fp32" ? 0.004 : 0.01;
    costs.errors[spec] = spec == "fp32" ? 0 : 0.9;
  }
  costs.errors["bf16"] = 0.0017;
  costs.errors["int8"] = 0.008;
  costs.errors["fp8"] = 0.026;
  costs.errors["int4"] = 0.15;
  return costs;
}

std::string chosen(const StepCosts& costs, const std::string& request) {
  const Recommendation r = recommend(costs, AutoCompression::parse(request).choices({}));
  return r.best[r.chosen].spec;
}

TEST(AutoCompression, CompressesOnSlowLinksAndNotOnFastOnes) {
  const double infinite = std::numeric_limits<double>::infinity();
  EXPECT_EQ(chosen(measured(infinite, 0), "auto:error=1"), "fp32");
  EXPECT_EQ(chosen(measured(25), "auto"), "int8");
  EXPECT_TRUE(chosen(measured(25), "auto:error=1").starts_with("powersgd"));
}

TEST(AutoCompression, NeverExceedsTheErrorBudget) {
  for (double error : {0.0, 0.001, 0.005, 0.02, 0.2, 1.0}) {
    for (double rate = 1; rate < 1e6; rate *= 10) {
      const StepCosts costs = measured(rate);
      const Recommendation r =
          recommend(costs, AutoCompression::parse(fmt::format("auto:error={}", error)).choices({}));
      const Prediction& p = r.best[r.chosen];
      EXPECT_LE(p.error, error) << p.spec;
      EXPECT_LE(p.step_ms, r.best[0].step_ms * r.from.tie) << p.spec;
      for (const Prediction& other : r.best) {
        if (other.error > error) continue;
        EXPECT_LE(p.step_ms, other.step_ms * r.from.tie) << p.spec << " instead of " << other.spec;
        EXPECT_TRUE(other.error >= p.error || other.step_ms > p.step_ms) << "a gentler spec is as fast";
      }
    }
  }
}

std::vector<std::string> names_of(const StepCosts& costs) {
  std::vector<std::string> names;
  for (const GradientTensor& tensor : costs.tensors) names.push_back(tensor.name);
  return names;
}

TEST(DenseBuckets, PatternsMatchExactlyTheNames) {
  const std::vector<std::string> all = names_of(measured(1));
  for (size_t count = 0; count <= all.size(); ++count) {
    const std::vector<std::string> some(all.begin(), all.begin() + static_cast<std::ptrdiff_t>(count));
    const std::vector<std::string> patterns = name_patterns(all, some);
    EXPECT_LE(patterns.size(), 25u) << count;
    for (size_t i = 0; i < all.size(); ++i) {
      const bool matched = std::ranges::any_of(patterns, [&](const std::string& pattern) {
        return fnmatch(pattern.c_str(), all[i].c_str(), 0) == 0;
      });
      EXPECT_EQ(matched, i < count) << all[i];
    }
  }
}

// Returns the bytes of the dense tensors of a spec.
int64_t dense_bytes(const StepCosts& costs, const std::string& text) {
  const CompressionSpec spec = CompressionSpec::parse(text);
  int64_t bytes = 0;
  for (const GradientTensor& tensor : costs.tensors) {
    const auto [rows, cols] = matrix_of(tensor);
    if (is_dense(spec, {.name = tensor.name, .rows = rows, .cols = cols})) bytes += 4 * rows * cols;
  }
  return bytes;
}

TEST(DenseBuckets, LeaveThePredictedStepUnchanged) {
  int64_t before = 0;
  int some = 0;
  for (double rate = 10; rate < 1e5; rate *= 1.5) {
    const StepCosts costs = measured(rate);
    for (const char* spec : {"int8", "int4"}) {
      const Prediction choice = predict_step(costs, spec, 25);
      const std::string text = with_dense_buckets(costs, choice);
      if (text.empty()) continue;
      ++some;
      StepCosts more = costs;
      copy_kernel_costs(spec, text, more);
      const Prediction better = predict_step(more, text, 25);
      EXPECT_LE(better.step_ms, choice.step_ms * (1 + 1e-9)) << text;
      EXPECT_GT(better.sent_bytes, choice.sent_bytes) << text;
      const int64_t bytes = dense_bytes(costs, text);
      EXPECT_LT(bytes, 4 * 88'000'000) << "the last bucket is compressed";
      if (spec == std::string("int8")) {
        EXPECT_GE(bytes, before) << "a faster link hides more";
        before = bytes;
      }
      EXPECT_EQ(AutoCompression().candidate_of(text), spec);
    }
  }
  EXPECT_GT(some, 10);
  EXPECT_EQ(with_dense_buckets(measured(10), predict_step(measured(10), "int8", 25)), "");
}

TEST(DenseBuckets, KeepTheDefaultOfCoarseFormats) {
  const StepCosts costs = measured(20'000);
  const std::string text = with_dense_buckets(costs, predict_step(costs, "int4", 25));
  EXPECT_NE(text.find("auto+"), std::string::npos) << text;
  EXPECT_EQ(AutoCompression().candidate_of("int4:block=64,dense=auto+head.*"), "") << "another format";
}

TEST(AutoCompression, ExcludesErrorsThatAreNotNumbers) {
  StepCosts costs = measured(25);
  for (auto& [spec, error] : costs.errors) {
    if (spec != "fp32") error = std::numeric_limits<double>::quiet_NaN();
  }
  EXPECT_EQ(chosen(costs, "auto:error=1"), "fp32");
  costs.errors.at("fp32") = std::numeric_limits<double>::quiet_NaN();
  EXPECT_EQ(chosen(costs, "auto:error=1"), "fp32");
}

TEST(AutoCompression, IntervalCoversTheStepsOfMeasurementsThatVary) {
  std::mt19937 random(1);
  std::normal_distribution<double> normal;
  const auto vary = [&](double deviation) { return std::max(0.1, 1 + deviation * normal(random)); };
  int covered = 0;
  constexpr int kTrials = 400;
  for (int trial = 0; trial < kTrials; ++trial) {
    StepCosts actual = measured(125);
    actual.spread.compute = 0.1;
    StepCosts seen = actual;
    seen.compute_ms *= vary(0.1);
    seen.spread.codec["int8"] = 0.2;
    seen.codec_ns.at("int8") *= vary(0.2);
    for (int i = 0; i < 3; ++i) {
      LinkCosts links = actual.links;
      const double change = vary(0.1);
      for (auto* pattern : {&links.neighbour, &links.all_pairs, &links.intra_node, &links.inter_node})
        pattern->bytes_per_us *= change;
      seen.spread.links.push_back(links);
    }
    seen.links = seen.spread.links[0];
    Prediction p = predict_step(seen, "int8", 25);
    add_interval(seen, p);
    const double step_ms = predict_step(actual, "int8", 25).step_ms;
    covered += p.low_ms <= step_ms && step_ms <= p.high_ms;
    EXPECT_LT(p.high_ms, 2 * p.step_ms);
  }
  EXPECT_GE(covered, 0.85 * kTrials);
  EXPECT_LE(covered, 0.99 * kTrials);
}

// The expected maximum of 2 and of 4 standard normal variables is 0.564 and 1.029 (1 / sqrt(pi); tables).
TEST(AutoCompression, RanksWaitForTheSlowestOfThem) {
  StepCosts costs = measured(125);
  for (const auto& [world, most] : {std::pair(2, 0.5642), std::pair(4, 1.0294)}) {
    costs.world = world;
    costs.spread.compute = 0;
    const Prediction steady = predict_step(costs, "int8", 25);
    costs.spread.compute = 0.1;
    const Prediction varying = predict_step(costs, "int8", 25);
    EXPECT_NEAR(varying.step_ms - steady.step_ms, most * 0.1 * costs.compute_ms, 1e-3 * costs.compute_ms);
    EXPECT_EQ(varying.compute_ms, steady.compute_ms);
  }
}

TEST(AutoCompression, EarlierMicroBatchesDoNotOverlapWithCommunication) {
  StepCosts costs = measured(125);
  const Prediction one = predict_step(costs, "int8", 25);
  costs.micro_batches = 3;
  const Prediction three = predict_step(costs, "int8", 25);
  EXPECT_DOUBLE_EQ(three.exposed_ms, one.exposed_ms);
  EXPECT_DOUBLE_EQ(three.step_ms, one.step_ms + 200);
  EXPECT_DOUBLE_EQ(three.compute_ms, one.compute_ms + 200);
}

// Ranks that measure different speeds agree on the slowest, and on rank 0's errors.
TEST(AutoCompression, AllRanksChooseAlike) {
  TrainConfig config;
  config.batch_size = 2;
  config.devices.assign(3, Device::host());
  const auto group = Communicator::create_local(config.devices, std::chrono::seconds(60));
  std::vector<RanksReport> reports(3);
  run_local_ranks(group, [&](Communicator& comm) {
    const AutoCompression request = AutoCompression::parse("auto:error=0.1,allow=bf16+int4");
    Examination what{.patience = 0.02, .choices = request.choices({25})};
    what.compute = [&](const Stream&, double) {
      return std::pair(Timing{.mean_ms = 100.0 * (1 + comm.rank())}, 0.0);
    };
    what.error = [&](const std::string& spec) {
      EXPECT_EQ(comm.rank(), 0);
      return spec == "fp32" ? 0 : spec == "bf16" ? 0.002 : 0.15;
    };
    reports[static_cast<size_t>(comm.rank())] = examine_ranks(comm, config, what);
  });
  for (const RanksReport& report : reports) {
    EXPECT_NEAR(report.costs.compute_ms, 300, 1e-6);
    EXPECT_EQ(report.costs.errors, reports[0].costs.errors);
    EXPECT_EQ(report.costs.errors.at("int4"), 0.15);
    EXPECT_EQ(report.recommendation.chosen, reports[0].recommendation.chosen);
    EXPECT_NE(report.recommendation.best[report.recommendation.chosen].spec, "int4");
  }
  expect_has(recommendation_text(reports[0], config.model), {"Choice: ", "0.15 > 0.1", "int4"});
}

TEST(EncodeErrors, MeasureEachCodecOnItsTensors) {
  // A matrix of rank 1, which PowerSGD represents exactly, and a vector of odd length.
  const std::vector<GradientTensor> tensors = {{"matrix", {96, 64}}, {"vector", {33}}};
  std::vector<float> gradients(96 * 64 + 36);
  for (int i = 0; i < 96 * 64; ++i) {
    gradients[static_cast<size_t>(i)] =
        std::sin(1.0f + static_cast<float>(i / 64)) * std::cos(2.0f + 3 * static_cast<float>(i % 64));
  }
  for (int i = 0; i < 33; ++i) gradients[static_cast<size_t>(96 * 64 + i)] = 0.01f * static_cast<float>(i);
  const std::vector<std::string> specs = {"fp32",           "bf16", "int8", "int4", "powersgd:rank=2",
                                          "randk:ratio=0.1"};
  std::vector<double> errors;
  for (const std::string& spec : specs)
    errors.push_back(encode_error(Device::host(), tensors, gradients, spec));
  EXPECT_EQ(errors[0], 0);
  EXPECT_GT(errors[1], 1e-4);
  for (size_t i = 1; i + 2 < errors.size(); ++i) EXPECT_GT(errors[i], errors[i - 1]) << specs[i];
  EXPECT_LT(errors[3], 0.3);
  EXPECT_LT(errors[4], 1e-4);
  EXPECT_GT(errors[5], 0.5);
  EXPECT_EQ(encode_error(Device::host(), tensors, gradients, "int8"), errors[2]);
  EXPECT_EQ(encode_error(Device::host(), tensors, std::vector<float>(gradients.size()), "int8"), 0);
  gradients[5] = std::numeric_limits<float>::quiet_NaN();
  EXPECT_TRUE(std::isnan(encode_error(Device::host(), tensors, gradients, "int8")));
}

TEST(EncodeErrors, IgnoreNodes) {
  const std::vector<GradientTensor> tensors = {{"vector", {4}}};
  const std::vector<float> gradients = {0.1f, 0.2f, 0.7f, -1.0f};
  const auto error = [&](const std::string& spec) {
    return try_encode_error(Device::host(), tensors, gradients, spec);
  };
  ASSERT_TRUE(error("int8"));
  for (const std::string options : {"schedule=hierarchical", "schedule=hierarchical,intra_node=fp32"})
    EXPECT_EQ(error("int8:" + options), error("int8")) << options;
}

TEST(EncodeErrors, ReportAFailureAsNotMeasured) {
  const std::vector<float> gradients(96 * 64, 0.5f);
  EXPECT_EQ(try_encode_error(Device::host(), {{"matrix", {96, 64}}}, gradients, "int9"), std::nullopt);
}

TEST(PredictionText, ComparesThePartsOfAStep) {
  RunSummary summary;
  EXPECT_EQ(prediction_text(summary), "");
  summary.measured = {.compute_ms = 100, .kernels_ms = 3, .links_ms = 10, .step_ms = 200};
  summary.predicted = {{.compute_ms = 110, .kernels_ms = 3, .links_ms = 8, .step_ms = 180}, 170, 190};
  expect_has(prediction_text(summary), {"compute", "110.0", "100.0", "+10 %", "8.00", "+0 %", "-20 %",
                                        "-10 %", "outside", "170.0 to 190.0 ms"});
  summary.predicted->high_ms = 210;
  expect_has(prediction_text(summary), {"inside"});
}

}  // namespace
}  // namespace gradwire::testing
