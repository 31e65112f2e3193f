// Tests the resolved configuration that follows from flags and launchers' variables.
#include "trainer/cli/flags.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cmath>
#include <limits>
#include <map>

#include "runtime/util/error.h"
#include "tests/support/expect.h"
#include "tests/trainer/files.h"
#include "tests/trainer/run_options.h"
#include "trainer/config/config.h"

namespace gradwire::testing {
namespace {

TEST(Models, EveryNamedModelIsValid) {
  EXPECT_EQ(model_names().size(), 6u);
  for (const std::string& name : model_names()) {
    EXPECT_EQ(named_model(name).name, name);
    EXPECT_NO_THROW(check_model(named_model(name))) << name;
  }
  expect_bad_input([] { named_model("vit_huge"); }, {"vit_huge", "vit_tiny", "vit_l_32"});
}

TEST(Models, InvalidShapesNameTheRemedy) {
  VitConfig model;
  model.patch = 5;
  expect_bad_input([&] { check_model(model); }, {"--patch", "1, 2, 4, 7, 14, 28"});
  model = VitConfig{};
  model.heads = 5;
  expect_bad_input([&] { check_model(model); }, {"--width 64", "--heads 5"});
  for (int32_t VitConfig::*field :
       {&VitConfig::image, &VitConfig::patch, &VitConfig::width, &VitConfig::depth, &VitConfig::heads,
        &VitConfig::mlp, &VitConfig::classes, &VitConfig::channels}) {
    for (int32_t value : {0, -1, 1 << 30}) {
      model = VitConfig{};
      model.*field = value;
      expect_bad_input([&] { check_model(model); }, {fmt::to_string(value)});
    }
  }
}

TEST(DataSpecs, RoundTripAndRejectInvalidOnes) {
  for (const char* text :
       {"fashion-mnist", "fashion-mnist:/data", "cifar10:/a:b", "arrays:x", "synthetic", "synthetic:12"}) {
    EXPECT_EQ(DataSpec::parse(text).to_string(), text);
  }
  for (const char* text :
       {"", "mnist", "cifar10", "cifar10:", "fashion-mnist:", "synthetic:0", "synthetic:-1", "synthetic:x",
        "synthetic:1x", "synthetic:", "synthetic:99999999999999999999"}) {
    expect_bad_input([&] { DataSpec::parse(text); }, {"--data '" + std::string(text) + "'", "synthetic[:N]"});
  }
}

TEST(Resolve, DefaultsDependOnTheOptimizerAndTheEpoch) {
  Resolved run = resolve(synthetic());
  EXPECT_EQ(run.config.steps, 30);  // 3 epochs of 400 / 40
  EXPECT_EQ(run.config.epochs, 3.0);
  EXPECT_EQ(run.config.warmup_steps, 3);
  EXPECT_EQ(run.config.lr, 1e-3);
  EXPECT_EQ(run.config.compression.to_string(), "fp32");
  RunOptions o = synthetic();
  o.optimizer_text = "sgd";
  o.steps = 7;
  o.accumulate = 2;
  run = resolve(o);
  EXPECT_EQ(run.config.lr, 0.05);
  EXPECT_EQ(run.config.steps, 7);
  EXPECT_EQ(run.config.epochs, 7.0 / 5.0);
  EXPECT_EQ(run.config.global_batch(), 80);
}

TEST(Resolve, ChannelsAndClassesMatchTheImages) {
  TemporaryFolder folder;
  write_cifar10(folder);
  RunOptions o;
  o.device = DeviceChoice::host;
  o.data_text = "cifar10:" + folder.path();
  o.model.image = 32;
  o.model.patch = 8;
  o.batch_size = 2;
  Resolved run = resolve(o);
  EXPECT_EQ(run.config.model.channels, 3);
  EXPECT_EQ(run.config.model.classes, 10);
  o.model.image = o.model.patch = 0;
  expect_bad_input([&] { resolve(o); }, {"28x28", "32x32", "--image-size 32"});
}

TEST(Resolve, BatchesLargerThanTheShardNameTheRemedy) {
  RunOptions o = synthetic();
  o.batch_size = 101;
  expect_bad_input([&] { resolve(o); }, {"--batch-size 101", "400 training images", "100 for each of 4 ranks",
                                         "--batch-size 100"});
  o.batch_size = 100;
  EXPECT_EQ(resolve(o).config.epochs, 3);
  o.accumulate = 2;
  expect_bad_input([&] { resolve(o); }, {"times --accumulate 2", "--batch-size 50"});
  o.rank_count = 401;
  o.batch_size = o.accumulate = 1;
  expect_bad_input([&] { resolve(o); }, {"fewer ranks"});
}

// Parses a command line. Throws BadInput with CLI11's text if it is rejected.
RunOptions parsed(std::vector<std::string> words) {
  CLI::App app;
  RunOptions o;
  add_run_flags(app, Setting::kTrain, o);
  std::reverse(words.begin(), words.end());  // the order expected by CLI11
  try {
    app.parse(words);
  } catch (const CLI::ParseError& error) {
    throw BadInput(error.what());
  }
  return o;
}

TEST(Flags, ParseEveryKindOfValue) {
  const RunOptions o =
      parsed({"--ranks", "010", "--lr", "1e-2", "--seed", "18446744073709551615", "--optimizer", "sgd",
              "--device", "host", "--bucket-mb", "0.5", "--gelu", "tanh"});
  EXPECT_EQ(o.model.gelu, Gelu::tanh);
  EXPECT_EQ(parsed({}).model.gelu, Gelu::exact);
  EXPECT_EQ(o.rank_count, 10);
  EXPECT_EQ(o.lr, 1e-2);
  EXPECT_EQ(o.seed, std::numeric_limits<uint64_t>::max());
  EXPECT_EQ(o.optimizer_text, "sgd");
  EXPECT_EQ(o.device, DeviceChoice::host);
  EXPECT_EQ(o.buckets_mb, std::vector{0.5});
  EXPECT_TRUE(parsed({}).buckets_mb.empty());
}

TEST(Resolve, LayersPerGradientGroupAreTwoByDefault) {
  EXPECT_EQ(resolve(synthetic()).config.gradient_group, 2);
  RunOptions o = synthetic();
  o.gradient_group = parsed({"--gradient-group", "4"}).gradient_group;
  const Resolved four = resolve(o);
  EXPECT_EQ(four.config.gradient_group, 4);
  ASSERT_FALSE(four.notes.empty());
  expect_has(four.notes.back(), {"--gradient-group has no effect on the host"});
}

TEST(Resolve, MomentumIsBeta1OfAdamw) {
  RunOptions o = synthetic();
  o.momentum = 0.25;
  EXPECT_EQ(resolve(o).config.beta1, 0.25);
  o.optimizer_text = "sgd";
  EXPECT_EQ(resolve(o).config.momentum, 0.25);
  EXPECT_EQ(resolve(o).config.beta1, 0.9);
}

TEST(Resolve, NotesAMomentumOnTopOfAResidual) {
  RunOptions o = synthetic();
  for (const auto& [spec, noted] : std::vector<std::pair<std::string, bool>>{{"topk:k=41", true},
                                                                             {"randk:ratio=0.1", true},
                                                                             {"sign", true},
                                                                             {"topk:k=41,ef=off", false},
                                                                             {"int8", false},
                                                                             {"powersgd:rank=4", false},
                                                                             {"varbits:bits=4", false}}) {
    o.specs = {spec};
    const std::vector<std::string> notes = resolve(o).notes;
    const bool found = std::ranges::any_of(
        notes, [](const std::string& note) { return note.find("--momentum 0") != std::string::npos; });
    EXPECT_EQ(found, noted) << spec;
  }
  o.specs = {"topk:k=41"}, o.momentum = 0;
  for (const std::string& note : resolve(o).notes) EXPECT_EQ(note.find("--momentum"), std::string::npos);
}

TEST(Resolve, ResidualPoliciesMustFitOptimizerAndSharding) {
  RunOptions o = synthetic();
  o.specs = {"topk:momentum=0.9"};
  expect_bad_input([&] { resolve(o); }, {"topk:momentum=0.9", "--optimizer sgd --momentum 0"});
  o.optimizer_text = "sgd", o.momentum = 0, o.rank_count = 1;
  expect_bad_input([&] { resolve(o); }, {"topk:momentum=0.9", "single rank", "momentum"});
  o.specs = {"int8:max_norm=1"};
  expect_bad_input([&] { resolve(o); }, {"int8:max_norm=1", "single rank", "max_norm"});
  o.specs = {"topk:momentum=0.9"};
  o.rank_count = 4;
  EXPECT_EQ(resolve(o).compressions[0].policy.momentum, 0.9);
  o.shard_optimizer = true;
  expect_bad_input([&] { resolve(o); }, {"topk:momentum=0.9", "--shard none"});
  o.specs = {"int8", "int8:ef=ef21"};
  expect_bad_input([&] { resolve(o); }, {"int8:ef=ef21", "--shard none"});
  o.specs = {"int8:ef_decay=0.9,start=5,ramp=10"};
  EXPECT_NO_THROW(resolve(o));
}

TEST(Resolve, OverlappedStepsExcludeGraphsAndShards) {
  RunOptions o = synthetic();
  o.overlap_forward = true;
  EXPECT_TRUE(resolve(o).config.overlap_forward);
  o.graph = true;
  expect_bad_input([&] { resolve(o); }, {"--overlap-forward", "--graph"});
  o.graph = false;
  o.shard_optimizer = true;
  expect_bad_input([&] { resolve(o); }, {"--overlap-forward", "--shard optimizer", "--shard none"});
}

TEST(Flags, RejectValuesOutsideOfTheirRowNamingTheRange) {
  int numbers = 0, choices = 0;
  for (const Setting& row : settings()) {
    if ((row.commands & Setting::kTrain) == 0) continue;
    const auto refuse = [&](const std::string& text, const std::string& expected) {
      expect_bad_input([&] { parsed({row.flag, text}); }, {row.flag, text, expected});
    };
    const auto [words, least, most] = row.values;
    const std::string choice = words;
    if (least < most) {
      const std::string range = fmt::format("from {} to ", least);
      for (const char* text : {"", "two", "nan", "inf", "-1"}) refuse(text, range);
      refuse(fmt::format("{}", least == 0 ? -0.5 : least / 2), range);
      if (std::isfinite(most)) refuse(fmt::format("{:.0f}", 2 * most), range);
      ++numbers;
    } else if (choice.find('|') != std::string::npos) {
      std::string list = choice;
      std::ranges::replace(list, '|', ',');
      for (const std::string text : {"", "quick", choice.c_str()}) refuse(text, list);
      ++choices;
    }
  }
  EXPECT_GE(numbers, 20);
  EXPECT_EQ(choices, 4);
  expect_bad_input(
      [&] {
        parsed({"--seed", "18446744073709551616"});
      },
      {"--seed", "to 18446744073709551615"});
  expect_bad_input([&] { parsed({"--optimizer", "lamb"}); }, {"--optimizer", "lamb", "sgd, adamw"});
  expect_bad_input([&] { parsed({"--steps", "1", "--epochs", "1"}); }, {"--steps", "--epochs"});
  expect_bad_input([&] { parsed({"--init", "a", "--resume", "b"}); }, {"--resume", "--init"});
  expect_bad_input([&] { parsed({"--checkpoint-keep", "3"}); }, {"--checkpoint-keep", "--checkpoint"});
}

TEST(Resolve, NamesEachInvalidValue) {
  auto refuse = [](const std::function<void(RunOptions&)>& change, const std::vector<std::string>& parts) {
    RunOptions o = synthetic();
    change(o);
    expect_bad_input([&] { resolve(o); }, parts);
  };
  refuse([](RunOptions& o) { o.model.name = "resnet"; }, {"unknown model 'resnet'"});
  refuse([](RunOptions& o) { o.warmup_steps = 31; }, {"--warmup 31", "30 steps"});
  refuse([](RunOptions& o) { o.momentum = 1; }, {"--momentum 1", "beta1"});
  refuse([](RunOptions& o) { o.specs = {"powersgd:rank=0"}; }, {"rank='0'"});
  refuse([](RunOptions& o) { o.specs = {"fp32", "zip"}; }, {"unknown method 'zip'"});
  refuse([](RunOptions& o) { o.ranks_per_node = 3; }, {"--ranks-per-node 3", "4 ranks"});
  refuse([](RunOptions& o) { o.ranks_per_node = 8; }, {"--ranks-per-node 8"});
  refuse(
      [](RunOptions& o) {
        o.specs = {"fp32", "bf16:schedule=hierarchical"};
      },
      {"bf16:schedule=hierarchical", "--ranks-per-node"});
  refuse([](RunOptions& o) { o.model.patch = 5; }, {"--patch"});
  if (cuda_device_count() == 0) {
    refuse([](RunOptions& o) { o.device = DeviceChoice::cuda; }, {"--device cuda", "--device host"});
  }
}

TEST(Resolve, NamesTheDeviceAndExplainsAFallback) {
  RunOptions o = synthetic();
  EXPECT_EQ(resolve(o).device_line.substr(0, 12), "Device: host");
  o.device = DeviceChoice::automatic;
  Resolved run = resolve(o);
  if (cuda_device_count() == 0) {
    expect_has(run.device_line, {"no GPU: "});
    EXPECT_TRUE(run.config.devices[3].is_host());
  } else {
    EXPECT_TRUE(run.config.devices[3].is_cuda());
  }
  EXPECT_EQ(run.config.ranks(), 4);
}

TEST(Link, AppliesToRanksOnTheHost) {
  RunOptions o = synthetic();
  o.link_text = "1000Mbit,20ms";
  o.ranks_per_node = 2;
  o.device = DeviceChoice::automatic;
  const TrainConfig config = resolve(o).config;
  EXPECT_EQ(config.link,
            (EmulatedLink{.bits_per_s = 1e9, .delay = std::chrono::milliseconds(20), .ranks_per_node = 2}));
  EXPECT_TRUE(config.devices[0].is_host());
  o.device = DeviceChoice::cuda;
  expect_bad_input([&] { resolve(o); }, {"--link 1000Mbit,20ms", "--device cuda", "--device host"});
}

TEST(Elastic, RejectsUnsupportedConfigurations) {
  RunOptions o = synthetic();
  o.elastic_text = "2:4";
  expect_bad_input([&] { resolve(o); }, {"--elastic 2:4", "start a process for each rank"});
  o.rank_count = 0;
  o.launch = launched_with({{"RANK", "2"}, {"WORLD_SIZE", "4"}});
  o.elastic_text = "2:4,keep-local";
  const TrainConfig config = resolve(o).config;
  EXPECT_EQ(config.elastic, (ElasticRange{2, 4}));
  EXPECT_EQ(config.elastic_batch, ElasticBatch::keep_local);
  for (const char* text : {"", "2", "2:", ":4", "0:4", "4:2", "2:4:6", "a:b", "-1:4", "2:4,keep-global"}) {
    o.elastic_text = text;
    expect_bad_input([&] { resolve(o); }, {fmt::format("--elastic '{}'", text), "MIN:MAX"});
  }
  for (const char* text : {"5:8", "1:3"}) {
    o.elastic_text = text;
    expect_bad_input([&] { resolve(o); }, {fmt::format("--elastic {}: 4 processes", text)});
  }
  o.elastic_text = "1:4";
  RunOptions sharded = o, overlapped = o, hierarchical = o;
  sharded.shard_optimizer = true;
  overlapped.overlap_forward = true;
  hierarchical.specs = {"fp32:schedule=hierarchical"};
  hierarchical.ranks_per_node = 2;
  expect_bad_input([&] { resolve(sharded); }, {"--elastic 1:4", "--shard optimizer", "--checkpoint"});
  const TemporaryFolder folder;
  sharded.checkpoint_directory = folder.path("saved");
  EXPECT_TRUE(resolve(sharded).config.shard_optimizer);
  expect_bad_input([&] { resolve(overlapped); }, {"--elastic 1:4", "--overlap-forward"});
  expect_bad_input([&] { resolve(hierarchical); },
                   {"--elastic 1:4", "schedule=hierarchical", "schedule=auto"});
}

TEST(Elastic, JoinersTakeTheRunsSettingsButNotItsHistory) {
  const TemporaryFolder folder;
  const std::string members = folder.path("members");
  expect_bad_input([&] { launch_of_joiner(members); }, {members, "--members"});
  std::ofstream(members) << "something else";
  expect_bad_input([&] { launch_of_joiner(members); }, {members, "not a list of a run's ranks"});
  std::ofstream(members) << members_text(4, "-\n127.0.0.1 1 a\n");
  EXPECT_EQ(read_members(members).invitation, "-\n127.0.0.1 1 a\n");
  RunOptions o = synthetic();
  o.rank_count = 0;
  o.elastic_text = "2:4";
  o.join = members;
  o.launch = launch_of_joiner(members);
  EXPECT_GE(o.launch->rank, o.launch->world) << "not a launched rank";
  o.checkpoint_directory = o.resume = folder.path("saved");
  const TrainConfig config = resolve(o).config;
  EXPECT_EQ(config.ranks(), 4);
  EXPECT_EQ(config.resume, "");
  EXPECT_EQ(config.members, members);
  o.join.clear();
  o.launch = launched_with({{"RANK", "2"}, {"WORLD_SIZE", "4"}});
  EXPECT_EQ(resolve(o).config.members, o.checkpoint_directory + "/members");
}

}  // namespace
}  // namespace gradwire::testing
