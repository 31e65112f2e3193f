// Restores rank 0 of a run of two ranks, whose files do not depend on the other rank. Each input replaces one
// file of an otherwise valid checkpoint.
#include "trainer/checkpoint/checkpoint.h"

#include <fmt/format.h>
#include <zlib.h>

#include <algorithm>
#include <cstring>
#include <thread>

#include "collectives/communicator/communicator.h"
#include "tests/fuzz/files.h"
#include "trainer/checkpoint/folder.h"
#include "trainer/train/weight_shards.h"

namespace gradwire::fuzz {
namespace {

TrainConfig tiny_run() {
  TrainConfig config;
  config.model = {.name = "tiny"};
  config.model.image = 4, config.model.patch = 2, config.model.classes = 4;
  config.model.width = 8, config.model.depth = 1, config.model.heads = 2, config.model.mlp = 16;
  config.devices.assign(2, Device::host());
  config.compression = CompressionSpec::parse("powersgd:rank=1,min_ratio=1");
  config.steps = 7;
  config.checkpoint_directory = (scratch() / "run").string();
  return config;
}

struct Rank {
  Rank(Communicator& communicator, const TrainConfig& run)
      : comm(communicator),
        config(run),
        stream(Stream::create(Device::host(), "fuzz")),
        reducer(comm, config.compression, gradient_tensors(config.model), {}),
        parameters(vit_parameters(config.model)),
        layout(reducer_layout(reducer)),
        weights(static_cast<size_t>(layout.elements)),
        moment(weights.size()) {}

  RankState state() {
    return {.comm = comm,
            .stream = stream,
            .reducer = reducer,
            .parameters = parameters,
            .layout = layout,
            .weights = {weights.data()},
            .moments = {{"m", {moment.data()}}},
            .parts = {{0, layout.elements}}};
  }

  Communicator& comm;
  const TrainConfig& config;
  Stream stream;
  Reducer reducer;
  std::vector<VitParameter> parameters;
  ParameterLayout layout;
  std::vector<float> weights, moment;
};

struct Run {
  Run() : config(tiny_run()), comms(Communicator::create_local(config.devices, std::chrono::seconds(60))) {
    std::thread other([this] { make(1); });
    make(0);
    other.join();
    for (const std::string& path : {weights_path(checkpoint), state_path(checkpoint, 0, 2)}) {
      paths.push_back(path);
      contents.push_back(read_whole(path));
    }
  }

  void make(int rank) {
    ranks[rank] = std::make_unique<Rank>(*comms[rank], config);
    const SavedCheckpoint saved = save_checkpoint(ranks[rank]->state(), config, {.step = 3});
    if (rank == 0) checkpoint = saved.path;
  }

  void restore() {
    may_refuse([&] {
      const CheckpointHead head = read_head(checkpoint);
      compare_with_head(config, head);
      restore_checkpoint(ranks[0]->state(), config, head);
    });
  }

  const TrainConfig config;
  const std::vector<std::unique_ptr<Communicator>> comms;
  std::unique_ptr<Rank> ranks[2];
  std::string checkpoint;
  std::vector<std::string> paths;  // files that inputs replace
  std::vector<Bytes> contents;     // saved contents of these files
};

Run& run_of_two() {
  static Run run;
  return run;
}

void put(const std::string& path, Input bytes) {
  std::ofstream file(path, std::ios::binary | std::ios::trunc);
  file.write(reinterpret_cast<const char*>(bytes.data()), static_cast<std::streamsize>(bytes.size()));
}

// Returns the same file with the correct checksum of its contents (trainer/data/safetensors.h), if the
// file has a field for a checksum.
Bytes with_its_checksum(Input input) {
  Bytes bytes(input.begin(), input.end());
  const std::string key = "\"crc32\":\"";
  const auto at = std::search(bytes.begin(), bytes.end(), key.begin(), key.end());
  if (bytes.size() < 8 || bytes.end() - at < static_cast<std::ptrdiff_t>(key.size()) + 8) return bytes;
  const auto digits = at + static_cast<std::ptrdiff_t>(key.size());
  std::fill_n(digits, 8, '0');
  const auto crc = static_cast<uint32_t>(crc32(0, bytes.data() + 8, static_cast<uInt>(bytes.size() - 8)));
  const std::string text = fmt::format("{:08x}", crc);
  std::copy(text.begin(), text.end(), digits);
  return bytes;
}

}  // namespace

void checkpoint(Input input) {
  Run& run = run_of_two();
  const Bytes sealed = with_its_checksum(input);
  for (size_t i = 0; i < run.paths.size(); ++i) {
    put(run.paths[i], sealed);
    run.restore();
    put(run.paths[i], run.contents[i]);
  }
}

std::vector<Bytes> checkpoint_seeds() {
  return run_of_two().contents;
}

}  // namespace gradwire::fuzz
