#include "trainer/checkpoint/checkpoint.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "runtime/error.h"
#include "runtime/shape.h"
#include "trainer/checkpoint/folder.h"
#include "trainer/checkpoint/safetensors.h"
#include "trainer/log/json.h"
#include "trainer/log/records.h"

namespace gradwire {
namespace {

using Entry = SafetensorsWriter::Entry;
using Tensor = SafetensorsReader::Tensor;

constexpr int kVersion = 1;
const char* const kAboutKey = "gradwire";
constexpr size_t kChunk = 4 << 20;  // bytes staged between device and file

std::string shape_text(const std::vector<int64_t>& shape) {
  return shape.empty() ? "a scalar" : fmt::format("{}", fmt::join(shape, "x"));
}

// "a, b, c and 4 more"
std::string few(const std::vector<std::string>& names) {
  constexpr size_t kShown = 3;
  const size_t shown = std::min(names.size(), kShown);
  const std::string text = fmt::format("{}", fmt::join(names.begin(), names.begin() + shown, ", "));
  return names.size() > kShown ? fmt::format("{} and {} more", text, names.size() - kShown) : text;
}

// A tensor of a file, and what it is written from or loaded to.
struct Source {
  Entry entry;
  TensorState state;
  size_t bytes() const { return static_cast<size_t>(element_count(entry.shape) * bytes_of(entry.dtype)); }
};

void write_file(const Stream& stream, const std::string& path, const Json& about,
                const std::vector<Source>& sources, uint64_t& bytes) {
  std::vector<Entry> entries;
  for (const Source& s : sources) entries.push_back(s.entry);
  // Hugging Face's readers require "format".
  SafetensorsWriter writer(path, {{"format", "pt"}, {kAboutKey, about.dump()}}, entries);
  std::vector<std::byte> chunk(kChunk);
  for (const Source& s : sources) {
    for (size_t at = 0; at < s.bytes(); at += kChunk) {
      const size_t n = std::min(kChunk, s.bytes() - at);
      s.state.read(stream, at, {chunk.data(), n});
      stream.synchronize();
      writer.write(std::span<const std::byte>(chunk.data(), n));
    }
  }
  writer.finish();
  bytes += writer.bytes();
}

[[noreturn]] void refuse_as_damaged(const SafetensorsReader& file, const std::string& what) {
  throw BadInput(fmt::format("{}: damaged: {}", file.path(), what));
}

void load(const Stream& stream, const SafetensorsReader& file, const Tensor& tensor, const TensorState& to) {
  if (tensor.dtype != name(to.dtype) || tensor.bytes != static_cast<uint64_t>(to.bytes())) {
    refuse_as_damaged(file, fmt::format("'{}' has {} bytes of {}, expected {} of {}", tensor.name,
                                        tensor.bytes, tensor.dtype, to.bytes(), name(to.dtype)));
  }
  std::vector<std::byte> chunk(std::min<size_t>(kChunk, tensor.bytes));
  for (size_t at = 0; at < tensor.bytes; at += kChunk) {
    const size_t n = std::min<size_t>(kChunk, tensor.bytes - at);
    file.read_bytes(tensor, at, {chunk.data(), n});
    to.write(stream, at, {chunk.data(), n});
    stream.synchronize();
  }
}

// A codec's state of a tensor, with its name in the files.
Source source_of(const TensorState& state, const RankState& rank) {
  const std::string& tensor = rank.parameters[static_cast<size_t>(state.tensor)].name;
  return {{fmt::format("{}.{}", state.kind, tensor), state.shape, state.dtype}, state};
}

Json about_rank(const TrainConfig& config, const Position& at, int rank) {
  return {{"version", kVersion},
          {"step", at.step},
          {"epoch", at.epoch},
          {"images", at.images},
          {"rank", rank},
          {"world", config.ranks()},
          {"seed", config.seed},
          {"compression", config.compression.to_string()},
          {"config", Json::parse(config_text(config))}};
}

Json links_json(const LinkCosts& links) {
  Json json = Json::array();
  for (const LinkCosts::Pattern& p : {links.neighbour, links.all_pairs, links.intra_node, links.inter_node}) {
    json.push_back({p.latency_us, p.bytes_per_us});
  }
  return json;
}

std::optional<LinkCosts> links_of(const Json& json) {
  LinkCosts links{.neighbour = {}, .all_pairs = {}, .intra_node = {}, .inter_node = {}, .measured = true};
  LinkCosts::Pattern* patterns[] = {&links.neighbour, &links.all_pairs, &links.intra_node, &links.inter_node};
  if (!json.is_array() || json.size() != std::size(patterns)) return {};
  for (size_t i = 0; i < json.size(); ++i) {
    const Json& pair = json[i];
    if (!pair.is_array() || pair.size() != 2 || !pair[0].is_number() || !pair[1].is_number()) return {};
    *patterns[i] = {pair[0].get<double>(), pair[1].get<double>()};
  }
  return links;
}

// A state file's description of itself.
Json about_of(const SafetensorsReader& file) {
  auto refuse = [&](const std::string& why) { throw BadInput(fmt::format("{}: {}", file.path(), why)); };
  const auto text = file.metadata().find(kAboutKey);
  if (text == file.metadata().end()) refuse("not written by gradwire as a checkpoint's state");
  Json about = parse_json(text->second);
  if (!about.is_object()) refuse("damaged: its metadata cannot be parsed");
  for (const char* key : {"version", "step", "epoch", "images", "rank", "world"}) {
    if (!about.contains(key) || !about[key].is_number_unsigned()) {
      refuse(fmt::format("damaged: its metadata has no {}", key));
    }
  }
  if (about["version"] != kVersion) {
    refuse(fmt::format("has version {}; this build reads version {}", about["version"].dump(), kVersion));
  }
  if (!about.contains("config") || !about["config"].is_object() || !about.contains("compression") ||
      !about["compression"].is_string()) {
    refuse("damaged: its metadata has no configuration");
  }
  return about;
}

void check_names(const SafetensorsReader& file, const std::vector<VitParameter>& parameters) {
  std::vector<std::string> missing, unexpected, misshaped;
  std::set<std::string> known;
  for (const VitParameter& parameter : parameters) {
    known.insert(parameter.name);
    const Tensor* tensor = file.find(parameter.name);
    if (tensor == nullptr) {
      missing.push_back(parameter.name);
    } else if (tensor->shape != parameter.shape) {
      misshaped.push_back(fmt::format("{} ({} in the file, {} in the model)", parameter.name,
                                      shape_text(tensor->shape), shape_text(parameter.shape)));
    } else if (tensor->dtype != "F32") {
      misshaped.push_back(fmt::format("{} (type {}, must be F32)", parameter.name, tensor->dtype));
    }
  }
  for (const Tensor& tensor : file.tensors()) {
    if (!known.contains(tensor.name)) unexpected.push_back(tensor.name);
  }
  std::string why;
  auto add = [&](const char* what, const std::vector<std::string>& names) {
    if (!names.empty()) why += fmt::format("; {}: {}", what, few(names));
  };
  add("missing", missing);
  add("unexpected", unexpected);
  add("wrong shape or type", misshaped);
  if (!why.empty()) throw BadInput(fmt::format("{}: not the weights of this model{}", file.path(), why));
}

// Every moment of the optimizer, with its name in rank 0's file.
std::vector<Source> moment_sources(const RankState& rank) {
  std::vector<Source> sources;
  for (const FlatState& moment : rank.moments) {
    for (size_t i = 0; i < rank.parameters.size(); ++i) {
      const VitParameter& p = rank.parameters[i];
      sources.push_back({{fmt::format("optimizer.{}.{}", moment.name, p.name), p.shape},
                         {.data = moment.data + rank.layout.offsets[i], .shape = p.shape}});
    }
  }
  return sources;
}

}  // namespace

CheckpointHead read_head(const std::string& checkpoint) {
  const int world = checkpoint_world(checkpoint);
  if (world == 0) throw BadInput(fmt::format("{}: not a complete checkpoint", checkpoint));
  const SafetensorsReader file(state_path(checkpoint, 0, world));
  const Json about = about_of(file);
  auto number = [&](const char* key) { return about[key].get<int64_t>(); };
  CheckpointHead head{.path = checkpoint,
                      .position = {number("step"), number("epoch"), number("images")},
                      .world = world,
                      .compression = about["compression"].get<std::string>(),
                      .links = links_of(about.value("links", Json())),
                      .config = about["config"].dump()};
  if (number("world") != world || number("rank") != 0) {
    throw BadInput(fmt::format("{}: it contains rank {} of {}, which contradicts its name", file.path(),
                               about["rank"].dump(), about["world"].dump()));
  }
  if (head.position.step < 0 || head.position.epoch < 0 || head.position.images < 0) {
    throw BadInput(fmt::format("{}: damaged: its step, epoch or images is negative", file.path()));
  }
  return head;
}

std::vector<std::string> compare_with_head(const TrainConfig& config, const CheckpointHead& head) {
  const Json theirs = Json::parse(head.config), ours = Json::parse(config_text(config));
  std::vector<std::string> notes, differences;
  for (const char* key : {"model", "optimizer", "momentum"}) {
    const Json there = theirs.value(key, Json()), here = ours.value(key, Json());
    // Only whether there is a momentum buffer matters.
    auto zero = [](const Json& j) { return j.is_number() && j.get<double>() == 0.0; };
    const bool fits = std::string(key) == "momentum" ? zero(there) == zero(here) : there == here;
    if (!fits) {
      throw BadInput(
          fmt::format("--resume {}: the checkpoint has {} {}, this run has {}; to load only the weights, "
                      "use --init",
                      head.path, key, there.dump(), here.dump()));
    }
  }
  if (head.position.step > config.steps) {
    throw BadInput(fmt::format(
        "--resume {}: the checkpoint is at step {}, the run ends at {}; give more --steps or --epochs",
        head.path, head.position.step, config.steps));
  }
  for (const char* key : {"data", "augment", "compression", "gather_weights", "batch_size", "accumulate",
                          "steps", "lr", "warmup_steps", "momentum", "beta1", "beta2", "eps", "weight_decay",
                          "precision", "seed", "bucket_mb", "device"}) {
    const Json there = theirs.value(key, Json()), here = ours.value(key, Json());
    if (!theirs.contains(key)) continue;  // an earlier version's
    if (there != here) differences.push_back(fmt::format("{} {}, now {}", key, there.dump(), here.dump()));
  }
  // A reduce-scatter's sum is not encoded, an allreduce's is. In an exact format that makes no difference.
  if (const Json there = theirs.value("shard", Json("none"));
      there != ours["shard"] && !config.compression.wire->exact) {
    differences.push_back(fmt::format("shard {}, now {}", there.dump(), ours["shard"].dump()));
  }
  if (head.world != config.ranks()) {
    notes.push_back(fmt::format(
        "Note: the checkpoint was made with {} rank{}, now {}; the sum of their residuals is kept",
        head.world, head.world == 1 ? "" : "s", config.ranks()));
  }
  for (const std::string& difference : differences) {
    notes.push_back(fmt::format(
        "Note: the checkpoint was made with {}; the run continues, but not with the same bits", difference));
  }
  return notes;
}

SavedCheckpoint save_checkpoint(const RankState& rank, const TrainConfig& config, const Position& position) {
  const std::string& directory = config.checkpoint_directory;
  const std::string folder = NewCheckpoint::temporary_path(directory, position.step);
  const bool leads = rank.comm.rank() == 0;
  rank.stream.synchronize();
  std::optional<NewCheckpoint> checkpoint;
  if (leads) checkpoint.emplace(directory, position.step);
  rank.comm.barrier();  // the folder exists now

  SavedCheckpoint saved{.path = NewCheckpoint::final_path(directory, position.step)};
  Json about = about_rank(config, position, rank.comm.rank());
  if (config.compression.schedule == ScheduleKind::automatic && rank.comm.world() > 2) {
    const LinkCosts& links = rank.comm.link_costs(rank.stream);  // known since the reducer was made
    if (links.measured) about["links"] = links_json(links);
  }
  std::vector<Source> weights, state;
  for (size_t i = 0; i < rank.parameters.size(); ++i) {
    const VitParameter& p = rank.parameters[i];
    weights.push_back({{p.name, p.shape}, {.data = rank.weights + rank.layout.offsets[i]}});
  }
  if (leads) state = moment_sources(rank);
  for (const TensorState& s : rank.reducer.tensor_state()) {
    if (leads || !s.same_on_all_ranks) state.push_back(source_of(s, rank));
  }
  try {
    if (leads) write_file(rank.stream, weights_path(folder), about, weights, saved.bytes);
    write_file(rank.stream, state_path(folder, rank.comm.rank(), rank.comm.world()), about, state,
               saved.bytes);
  } catch (const Error& error) {
    if (leads) throw;
    throw Error(
        fmt::format("{}; rank 0 makes this folder, and every rank writes to it: with several machines, "
                    "--checkpoint must be on a shared file system",
                    error.what()));
  }
  rank.comm.barrier();  // all files are on disk now
  if (checkpoint) checkpoint->commit(config.checkpoint_keep);
  return saved;
}

bool restore_checkpoint(const RankState& rank, const TrainConfig& config, const CheckpointHead& head) {
  rank.stream.synchronize();  // an error below may free memory that the stream still uses
  const int world = rank.comm.world(), me = rank.comm.rank();
  const std::vector<TensorState> states = rank.reducer.tensor_state();
  const bool same_codec = config.compression.loads_state_of(head.compression);

  std::vector<float> flat(static_cast<size_t>(rank.layout.elements));
  load_weights(weights_path(head.path), rank.parameters, rank.layout, true, flat);
  to_device(rank.stream, rank.weights, std::span<const float>(flat));

  const SafetensorsReader common(state_path(head.path, 0, head.world));
  common.verify(true);
  for (const Source& source : moment_sources(rank)) {
    const Tensor* tensor = common.find(source.entry.name);
    if (tensor == nullptr || tensor->shape != source.entry.shape) {
      refuse_as_damaged(common, fmt::format("'{}' is missing or has another shape", source.entry.name));
    }
    load(rank.stream, common, *tensor, source.state);
  }
  auto restore_state = [&](const SafetensorsReader& file, const TensorState& state) {
    const Source source = source_of(state, rank);
    const Tensor* tensor = file.find(source.entry.name);
    const bool fits =
        tensor != nullptr && tensor->dtype == name(state.dtype) && tensor->elements == state.count();
    // Without a state from the same codec, the codec keeps its initial state.
    if (same_codec && head.world > 1 && !fits) {
      refuse_as_damaged(file, fmt::format("'{}' is missing or has another shape or type", source.entry.name));
    }
    if (fits) load(rank.stream, file, *tensor, state);
  };
  for (const TensorState& state : states) {
    if (state.same_on_all_ranks) restore_state(common, state);
  }

  std::fill(flat.begin(), flat.end(), 0.0f);
  bool any = false;
  for (int from = me; from < head.world; from += world) {
    const SafetensorsReader file(state_path(head.path, from, head.world));
    file.verify(true);
    const Json about = about_of(file);
    if (about["step"] != head.position.step || about["rank"] != from || about["world"] != head.world) {
      refuse_as_damaged(file, "it belongs to another rank or step");
    }
    for (size_t i = 0; i < rank.parameters.size(); ++i) {
      const VitParameter& p = rank.parameters[i];
      const Tensor* tensor = file.find(fmt::format("{}.{}", kResidualKind, p.name));
      if (tensor == nullptr) continue;
      if (tensor->shape != p.shape || tensor->dtype != "F32")
        refuse_as_damaged(file, fmt::format("'{}' has another shape or type", tensor->name));
      float* sum = flat.data() + rank.layout.offsets[i];
      if (from == me) {
        file.read(*tensor, 0, {sum, static_cast<size_t>(tensor->elements)});
      } else {
        std::vector<float> more(static_cast<size_t>(tensor->elements));
        file.read(*tensor, 0, more);
        for (size_t e = 0; e < more.size(); ++e) sum[e] += more[e];
      }
      any = true;
    }
    for (const TensorState& state : states) {
      const bool mine = !state.same_on_all_ranks && state.kind != kResidualKind;
      if (mine && head.world == world) restore_state(file, state);
    }
  }
  std::vector<const TensorState*> residual(rank.parameters.size());
  for (const TensorState& state : states) {
    if (state.kind == kResidualKind) residual[static_cast<size_t>(state.tensor)] = &state;
  }
  bool left_over = false;
  for (size_t i = 0; any && i < rank.parameters.size(); ++i) {
    float* sum = flat.data() + rank.layout.offsets[i];
    const int64_t count = rank.parameters[i].elements();
    if (same_codec && residual[i] != nullptr) {
      residual[i]->write(rank.stream, 0,
                         std::as_bytes(std::span<const float>(sum, static_cast<size_t>(count))));
      rank.stream.synchronize();
      std::fill_n(sum, count, 0.0f);
    } else {
      left_over = left_over || std::any_of(sum, sum + count, [](float x) { return x != 0.0f; });
    }
  }
  if (left_over) {
    to_device(rank.stream, rank.left_over, std::span<const float>(flat));
  }
  rank.reducer.resume_at(head.position.step);
  return left_over;
}

void load_weights(const std::string& path, const std::vector<VitParameter>& parameters,
                  const ParameterLayout& layout, bool checksum_required, std::span<float> out) {
  const SafetensorsReader file(path);
  check_names(file, parameters);
  file.verify(checksum_required);
  std::fill(out.begin(), out.end(), 0.0f);
  for (size_t i = 0; i < parameters.size(); ++i) {
    file.read(
        *file.find(parameters[i].name), 0,
        out.subspan(static_cast<size_t>(layout.offsets[i]), static_cast<size_t>(parameters[i].elements())));
  }
}

void check_weights(const std::string& path, const VitConfig& model) {
  check_names(SafetensorsReader(path), vit_parameters(model));
}

}  // namespace gradwire
