// The files of checkpoints: their contents, the folder, and the rejection of damaged files.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <random>

#include "tests/support/devices.h"
#include "tests/support/expect.h"
#include "tests/support/thinned.h"
#include "tests/trainer/checkpoint_fixture.h"
#include "tests/trainer/files.h"
#include "trainer/data/safetensors.h"
#include "trainer/log/records.h"

namespace gradwire::testing {
namespace {

namespace fs = std::filesystem;

class CheckpointFiles : public CheckpointFixture {};
GW_INSTANTIATE_ON_DEVICES(CheckpointFiles);

// Checks that each rank writes its part, and no rank needs memory for the whole state.
TEST_P(CheckpointFiles, RanksOfAShardedRunWriteTheirShards) {
  constexpr int kRanks = 3;
  TrainConfig c = config(kRanks, "fp32");
  c.bucket_mb = 0.003;
  c.shard_optimizer = true;
  c.checkpoint_directory = folder_.path("run");
  const auto parameters = vit_parameters(c.model);
  std::array<uint64_t, kRanks> bytes{};
  run_ranks(kRanks, GetParam(), [&](Communicator& comm) {
    CheckpointedRank rank(comm, c, reducer_options(c));
    const Optimizer optimizer(c, rank.stream, rank.reducer.owned());
    // The value of an element is its index in the layout. The elements of other ranks are wrong here.
    std::vector<float> mine(rank.layout.elements, -1.0f), moments;
    for (const ElementRange& part : rank.reducer.owned()) {
      for (int64_t e = part.begin; e < part.end; ++e) {
        mine[e] = static_cast<float>(e);
        moments.push_back(static_cast<float>(-e));
      }
    }
    to_device(rank.stream, rank.weights.as<float>(), std::span<const float>(mine));
    for (const FlatState& moment : optimizer.moments())
      to_device(rank.stream, moment.values.data, std::span<const float>(moments));
    RankState rank_state = rank.state();
    rank_state.moments = optimizer.moments();
    rank_state.parts = rank.reducer.owned();
    rank_state.divided = true;
    const SavedCheckpoint saved = save_checkpoint(rank_state, c, {.step = 1});
    bytes[comm.rank()] = saved.bytes;
    if (comm.rank() != 0) return;
    const SafetensorsReader model(weights_path(saved.path)), state(state_path(saved.path, 0, kRanks));
    model.verify(true), state.verify(true);
    for (size_t i = 0; i < parameters.size(); ++i) {
      const std::string& name = parameters[i].name;
      std::vector<float> weight(parameters[i].elements()), m(weight.size());
      model.read(*model.find(name), 0, weight);
      state.read(*state.find("optimizer.m." + name), 0, m);
      for (size_t e = 0; e < weight.size(); ++e) {
        const float index = static_cast<float>(rank.layout.offsets[i]) + static_cast<float>(e);
        ASSERT_EQ(weight[e], index) << name << ", element " << e;
        ASSERT_EQ(m[e], -index) << name << ", element " << e;
      }
    }
  });
  const auto whole = static_cast<double>(3 * sizeof(float) * count_elements(parameters));
  for (uint64_t written : bytes) {
    EXPECT_GT(static_cast<double>(written), 0.9 * whole / kRanks);
    EXPECT_LT(static_cast<double>(written), 1.1 * whole / kRanks + 30e3) << "headers included";
  }
}

// Writes moments with twice the expected number of bytes, in a file with a correct checksum.
TEST_P(CheckpointFiles, RejectsMomentsOfAnotherType) {
  const TrainConfig c = config(1, "fp32");
  train_and_save(c);
  const std::string path = state_path(checkpoint(4), 0, 1);
  const SafetensorsReader good(path);
  std::vector<SafetensorsWriter::Entry> entries;
  uint64_t bytes = 0;
  for (const SafetensorsReader::Tensor& tensor : good.tensors()) {
    entries.push_back({tensor.name, tensor.shape, DType::f64});
    bytes += 2 * tensor.bytes;
  }
  auto metadata = good.metadata();
  metadata.erase("crc32");
  fs::remove(path);
  SafetensorsWriter writer(path, metadata, entries);
  writer.write(std::vector<std::byte>(bytes));
  writer.finish();
  expect_bad_input([&] { train_from(c, checkpoint(4)); }, {"of F64, expected"});
}

TEST_P(CheckpointFiles, InitializesARunWithTheWeightsOfACheckpoint) {
  TrainConfig c = config(2, "fp32");
  train_and_save(c);
  c.init = weights_path(checkpoint(7));
  c.lr = 0, c.weight_decay = 0, c.steps = 1, c.eval_every = 0;
  c.checkpoint_directory = folder_.path("again");
  c.checkpoint_every = 1;
  train(c);
  EXPECT_EQ(weights_in(weights_path(NewCheckpoint::final_path(folder_.path("again"), 1))),
            weights_in(c.init));

  VitConfig other = c.model;
  other.mlp = 24, other.depth = 2;
  expect_bad_input(
      [&] { check_weights(c.init, other); },
      {c.init, "missing", "encoder_layer_1", "mlp.0.weight (16x8 in the file, 24x8 in the model)"});
  other = c.model;
  other.depth = 0;
  expect_bad_input([&] { check_weights(c.init, other); },
                   {c.init, "unexpected: encoder.layers.encoder_layer_0."});
}

TEST_P(CheckpointFiles, KeepsTheLatestAndSkipsUnfinishedOnes) {
  TrainConfig c = config(2, "bf16");
  const std::string run = folder_.path("run");
  c.checkpoint_directory = run;
  c.checkpoint_every = 2;
  c.checkpoint_keep = 2;
  fs::create_directories(run + "/step-000000002.tmp");  // left by a killed run
  fs::create_directories(run + "/not-ours");
  train(c);
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator(run)) names.push_back(entry.path().filename());
  std::sort(names.begin(), names.end());
  EXPECT_EQ(names, (std::vector<std::string>{"lock", "not-ours", "step-000000006", "step-000000007"}));

  fs::create_directories(run + "/step-000000008.tmp");
  fs::remove(state_path(run + "/step-000000007", 1, 2));
  const FoundCheckpoint found = find_checkpoint(run);
  EXPECT_EQ(found.path, run + "/step-000000006");
  ASSERT_EQ(found.ignored.size(), 2u);
  expect_has(found.ignored[0], {"step-000000008.tmp: it was not finished"});
  expect_has(found.ignored[1], {"step-000000007: incomplete"});
  EXPECT_EQ(find_checkpoint(run + "/step-000000006").path, run + "/step-000000006");
  EXPECT_FALSE(find_checkpoint(run + "/not-ours").path);
  expect_bad_input([&] { find_checkpoint(run + "/nowhere"); }, {"nowhere", "no such folder"});
  expect_bad_input([&] { read_head(run + "/step-000000007"); }, {"step-000000007", "not a complete"});
}

TEST(CheckpointHead, KeepsLinkCosts) {
  LinkCosts links;
  links.measured = true;
  links.neighbour = {1, 2}, links.all_pairs = {3, 4}, links.intra_node = {5, 6}, links.inter_node = {7, 8};
  EXPECT_EQ(links_of(links_json(links)), links);
  links.library_measured = true;
  links.library = {9, 10};
  EXPECT_EQ(links_of(links_json(links)), links);
  Json incomplete = links_json(links), text = incomplete, alone = incomplete;
  incomplete.erase("inter_node");
  text["library"] = {"9", 10};
  alone["neighbour"] = {1};
  for (const Json& wrong : {incomplete, text, alone, Json::array({{1, 2}, {3, 4}}), Json("fast"), Json()}) {
    EXPECT_FALSE(links_of(wrong)) << wrong;
  }
}

TEST_P(CheckpointFiles, RejectsARunThatDoesNotFit) {
  TrainConfig c = config(1, "fp32");
  train_and_save(c);
  auto refused = [&](const std::function<void(TrainConfig&)>& change, const std::vector<std::string>& parts) {
    TrainConfig other = c;
    other.resume = checkpoint(4);
    change(other);
    expect_bad_input([&] { train(other); }, parts);
  };
  refused([](TrainConfig& t) { t.model.mlp = 24; }, {"model.mlp 16", "this run 24", "--init"});
  refused([](TrainConfig& t) { t.model.gelu = Gelu::tanh; }, {"model", "\"gelu\":\"tanh\"", "--init"});
  refused([](TrainConfig& t) { t.optimizer = OptimizerKind::sgd; }, {"optimizer", "adamw", "sgd"});
  refused([](TrainConfig& t) { t.steps = 3; }, {"at step 4", "ends at 3", "--steps"});
  c.resume = checkpoint(4);
  EXPECT_TRUE(compare_with_head(c, read_head(checkpoint(4))).empty());
  c.lr = 0.5;
  const auto notes = compare_with_head(c, read_head(checkpoint(4)));
  ASSERT_EQ(notes.size(), 1u);
  expect_has(notes[0], {"lr 0.01, now 0.5"});
  CheckpointHead head = read_head(checkpoint(4));
  Json saved = parse_json(head.config);
  saved["shard"] = "full";
  head.config = saved.dump();
  expect_bad_input([&] { compare_with_head(c, head); }, {head.path, "shard \"full\"", "\"optimizer\""});
}

// Flips a random bit in a file of a checkpoint, or truncates the file, 1,000 times. An accepted change must
// have no effect, because a checksum's digits may be upper-case.
TEST(Checkpoint, DamagedFilesAreRejectedByNameOrChangeNothing) {
  TrainConfig c;
  c.model = tiny_model();
  c.devices.assign(2, Device::host());
  c.compression = CompressionSpec::parse("int8");
  c.batch_size = 4, c.steps = 2, c.eval_batch_size = 8;
  const TemporaryFolder folder;
  c.checkpoint_directory = folder.path("run");
  c.checkpoint_every = 2;
  Recorder recorder;
  run_training(c, make_synthetic(c.model, 38, 10, 1), {{&recorder}});
  const std::string from = NewCheckpoint::final_path(folder.path("run"), 2);
  const std::vector<std::string> paths{weights_path(from), state_path(from, 0, 2), state_path(from, 1, 2)};
  const std::vector<Restored> sound = restore(c, 1, Device::host(), from);
  std::mt19937 random(17);
  const int kTrials = short_sweeps() ? 100 : 1000;
  int refused = 0;
  for (int trial = 0; trial < kTrials; ++trial) {
    const std::string& path = paths[trial % paths.size()];
    const Bytes good = read_bytes(path);
    Bytes bad = good;
    // A third of the damage is in the first bytes, which contain the structure.
    const size_t at = random() % (trial / 3 % 3 == 0 ? 200 : good.size());
    const bool cut = trial / 9 % 3 == 0;
    if (cut) {
      bad.resize(at);
    } else {
      bad[at] ^= static_cast<uint8_t>(1u << random() % 8);
    }
    write_bytes(path, bad);
    try {
      EXPECT_TRUE(restore(c, 1, Device::host(), from) == sound && !cut)
          << path << ": byte " << at << " changed what was restored";
    } catch (const BadInput& error) {
      ++refused;
      expect_has(error.what(), {from});
    }
    write_bytes(path, good);
  }
  EXPECT_GE(refused, kTrials * 9 / 10);
}

}  // namespace
}  // namespace gradwire::testing
