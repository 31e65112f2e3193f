#include "trainer/checkpoint/checkpoint.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <map>
#include <memory>
#include <random>
#include <set>

#include "collectives/agreement/statements.h"
#include "collectives/reducer/snapshot.h"
#include "runtime/device/device.h"
#include "trainer/checkpoint/folder.h"
#include "trainer/log/records.h"

namespace gradwire {
namespace {

using Entry = SafetensorsWriter::Entry;
using Tensor = SafetensorsReader::Tensor;

constexpr size_t kChunk = 4 << 20;  // bytes staged between device and file

std::string shape_text(const std::vector<int64_t>& shape) {
  return shape.empty() ? "a scalar" : fmt::format("{}", fmt::join(shape, "x"));
}

// Returns the first names and the number of further names: "a, b, c and 4 more".
std::string few(const std::vector<std::string>& names) {
  constexpr size_t kShown = 3;
  const size_t shown = std::min(names.size(), kShown);
  const std::string text = fmt::format("{}", fmt::join(names.begin(), names.begin() + shown, ", "));
  return names.size() > kShown ? fmt::format("{} and {} more", text, names.size() - kShown) : text;
}

// A tensor of a file, or a part of a tensor, with its source or destination in memory.
struct Piece {
  std::string tensor;
  int64_t first = 0;  // first element in the file's tensor
  TensorState state;
  uint64_t first_byte() const { return static_cast<uint64_t>(first * bytes_of(state.dtype)); }
};

// Returns whether all values are finite.
bool write(const Stream& stream, SafetensorsWriter& file, const std::vector<Piece>& pieces) {
  std::vector<std::byte> chunk(kChunk);
  bool finite = true;
  for (const Piece& piece : pieces) {
    file.seek(piece.tensor, piece.first_byte());
    const auto bytes = static_cast<size_t>(piece.state.bytes());
    for (size_t at = 0; at < bytes; at += kChunk) {
      const size_t n = std::min(kChunk, bytes - at);
      piece.state.read(stream, at, {chunk.data(), n});
      stream.synchronize();
      file.write(std::span<const std::byte>(chunk.data(), n));
      if (piece.state.dtype != DType::f32) continue;
      const auto* values = reinterpret_cast<const float*>(chunk.data());
      finite =
          finite && std::all_of(values, values + n / sizeof(float), [](float x) { return std::isfinite(x); });
    }
  }
  return finite;
}

// Throws BadInput unless `sound`: "FILE: damaged: TEXT".
template <typename... Args>
void require_sound(bool sound, const SafetensorsReader& file, fmt::format_string<Args...> text,
                   Args&&... args) {
  require(sound, "{}: damaged: {}", file.path(), sound ? "" : fmt::format(text, std::forward<Args>(args)...));
}

// Loads a tensor. Requires that `tensor` has the length of its pieces.
void load(const Stream& stream, const SafetensorsReader& file, const Tensor& tensor, const Piece& to) {
  const auto bytes = static_cast<size_t>(to.state.bytes());
  std::vector<std::byte> chunk(std::min(kChunk, bytes));
  const FinishOnError finish(stream);
  for (size_t at = 0; at < bytes; at += kChunk) {
    const size_t n = std::min(kChunk, bytes - at);
    file.read_bytes(tensor, to.first_byte() + at, {chunk.data(), n});
    to.state.write(stream, at, {chunk.data(), n});
    stream.synchronize();
  }
}

// Returns the piece for a codec's state of a tensor, with its name in the files.
Piece piece_of(const TensorState& state, const RankState& rank) {
  const std::string& tensor = rank.parameters[static_cast<size_t>(state.tensor)].name;
  return {.tensor = fmt::format("{}.{}", state.kind, tensor), .state = state};
}

// Returns this rank's part of every tensor of weights or moments.
std::vector<Piece> pieces_of(Parts<float> flat, const RankState& rank, const std::string& prefix) {
  std::vector<Piece> pieces;
  int64_t packed = 0;
  for (const ElementRange& part : rank.parts) {
    for (size_t i = 0; i < rank.parameters.size(); ++i) {
      const int64_t offset = rank.layout.offsets[i];
      const int64_t begin = std::max(part.begin, offset);
      const int64_t end = std::min(part.end, offset + rank.parameters[i].elements());
      if (begin >= end) continue;
      float* const data = flat.data + (flat.packed ? packed + begin - part.begin : begin);
      pieces.push_back({.tensor = prefix + rank.parameters[i].name,
                        .first = begin - offset,
                        .state = {.data = data, .shape = {end - begin}}});
    }
    packed += part.count();
  }
  return pieces;
}

std::string prefix_of(const FlatState& moment) {
  return fmt::format("optimizer.{}.", moment.name);
}

std::vector<Piece> moment_pieces(const RankState& rank) {
  std::vector<Piece> pieces;
  for (const FlatState& moment : rank.moments) {
    for (Piece& piece : pieces_of(moment.values, rank, prefix_of(moment))) pieces.push_back(std::move(piece));
  }
  return pieces;
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
  require(why.empty(), "{}: not the weights of this model{}", file.path(), why);
}

Json about_file(const RankState& rank, const TrainConfig& config, const Position& position) {
  // The reducer's constructor has measured the costs if there is a choice, so this call does not measure.
  const LinkCosts& links = rank.comm.link_costs(rank.stream, config.compression.schedule);
  return about_file(config, position, rank.comm.rank(), links.measured ? &links : nullptr);
}

std::unique_ptr<SafetensorsWriter> create_file(const std::string& path, const Json& about,
                                               const std::vector<Entry>& entries) {
  // Hugging Face's readers require the key "format".
  return std::make_unique<SafetensorsWriter>(
      path, std::map<std::string, std::string>{{"format", "pt"}, {kAboutKey, about.dump()}}, entries);
}

// Returns this rank's state that no other rank holds or writes.
std::vector<Piece> own_state(const RankState& rank) {
  std::vector<Piece> pieces;
  for (const TensorState& state : rank.reducer.tensor_state()) {
    if (rank.comm.rank() == 0 || !state.same_on_all_ranks) pieces.push_back(piece_of(state, rank));
  }
  return pieces;
}

void append_entries(std::vector<Entry>& entries, const std::vector<Piece>& whole) {
  for (const Piece& piece : whole) entries.push_back({piece.tensor, piece.state.shape, piece.state.dtype});
}

void append_entries(std::vector<Entry>& entries, const std::vector<VitParameter>& parameters,
                    const std::string& prefix) {
  for (const VitParameter& p : parameters) entries.push_back({prefix + p.name, p.shape});
}

// The files that can contain parts of several ranks: the weights and rank 0's state. Rank 0 creates and
// finishes these files. Empty on ranks that write no part.
using CommonFiles = std::vector<std::unique_ptr<SafetensorsWriter>>;

CommonFiles create_common_files(const RankState& rank, const Json& about, const std::string& folder) {
  std::vector<Entry> weights, state;
  append_entries(weights, rank.parameters, "");
  for (const FlatState& moment : rank.moments) append_entries(state, rank.parameters, prefix_of(moment));
  append_entries(state, own_state(rank));
  CommonFiles files;
  files.push_back(create_file(weights_path(folder), about, weights));
  files.push_back(create_file(state_path(folder, 0, rank.comm.world()), about, state));
  return files;
}

// Finishes the common files with the parts of all ranks. Returns whether all ranks' values are `finite`.
// Collective.
bool finish_common_files(const RankState& rank, const CommonFiles& files, bool finite) {
  std::vector<double> mine{finite ? 1.0 : 0.0};
  for (size_t f = 0; f < 2; ++f) {
    const auto part = f < files.size() ? files[f]->written() : SafetensorsWriter::Written{};
    mine.insert(mine.end(), {static_cast<double>(part.bytes), static_cast<double>(part.crc)});
  }
  const auto all = all_gather(rank.comm.transport(), rank.stream, mine, "the parts of a checkpoint");
  for (size_t f = 0; rank.comm.rank() == 0 && f < files.size(); ++f) {
    SafetensorsWriter::Written by_others;
    for (size_t r = 1; r < all.size(); ++r) {
      by_others += {static_cast<uint64_t>(all[r][2 * f + 1]), static_cast<uint32_t>(all[r][2 * f + 2])};
    }
    files[f]->finish(by_others);
  }
  return std::all_of(all.begin(), all.end(), [](const auto& part) { return part[0] != 0; });
}

}  // namespace

SavedCheckpoint save_checkpoint(const RankState& rank, const TrainConfig& config, const Position& position) {
  const std::string& directory = config.checkpoint_directory;
  const std::string folder = NewCheckpoint::temporary_path(directory, position.step);
  const bool leads = rank.comm.rank() == 0;
  rank.stream.synchronize();
  std::optional<NewCheckpoint> checkpoint;
  CommonFiles common;
  Json about = about_file(rank, config, position);
  std::string id(16, ' ');
  if (leads) {
    std::random_device random;
    id = fmt::format("{:08x}{:08x}", random(), random());
    about["id"] = id;
    checkpoint.emplace(directory, position.step);
    common = create_common_files(rank, about, folder);
  }
  // Waits until rank 0 has created the folder and its common files.
  about["id"] = all_gather_bytes(rank.comm.transport(), rank.stream, id, "a checkpoint's id")[0];

  bool finite = true;
  SavedCheckpoint saved{.path = NewCheckpoint::final_path(directory, position.step)};
  try {
    if (!leads && rank.divided) {
      for (const std::string& path : {weights_path(folder), state_path(folder, 0, rank.comm.world())}) {
        common.push_back(std::make_unique<SafetensorsWriter>(path));
      }
    }
    if (!common.empty()) {
      finite = write(rank.stream, *common[0], pieces_of(rank.weights, rank, "")) && finite;
      finite = write(rank.stream, *common[1], moment_pieces(rank)) && finite;
    }
    if (leads) {
      finite = write(rank.stream, *common[1], own_state(rank)) && finite;
    } else {
      for (const auto& file : common) file->close();
      std::vector<Entry> entries;
      append_entries(entries, own_state(rank));
      const auto own = create_file(state_path(folder, rank.comm.rank(), rank.comm.world()), about, entries);
      finite = write(rank.stream, *own, own_state(rank)) && finite;
      own->finish();
      saved.bytes += own->written().bytes;
    }
  } catch (const Error& error) {
    if (leads) throw;
    throw Error(
        "{}; rank 0 makes this folder, and every rank writes to it: with several machines, --checkpoint must "
        "be on a shared file system",
        error.what());
  }
  finite = finish_common_files(rank, common, finite);
  for (const auto& file : common) saved.bytes += file->written().bytes;
  rank.comm.barrier();  // returns when all ranks' files are on disk
  if (checkpoint) checkpoint->commit(config.checkpoint_keep, finite);
  return saved;
}

bool restore_checkpoint(const RankState& rank, const TrainConfig& config, const CheckpointHead& head) {
  rank.stream.synchronize();  // an exception below may free memory that the stream still uses
  const int world = rank.comm.world(), me = rank.comm.rank();
  const std::vector<TensorState> states = rank.reducer.tensor_state();
  const bool same_codec = config.compression.loads_state_of(head.compression);

  const SafetensorsReader weights(weights_path(head.path));
  check_same_checkpoint(head, weights);
  check_names(weights, rank.parameters);
  weights.verify(true);
  for (const Piece& piece : pieces_of(rank.weights, rank, ""))
    load(rank.stream, weights, *weights.find(piece.tensor), piece);

  const SafetensorsReader common(state_path(head.path, 0, head.world));
  common.verify(true);
  for (const FlatState& moment : rank.moments) {
    for (const VitParameter& p : rank.parameters) {
      const std::string name = prefix_of(moment) + p.name;
      const Tensor* tensor = common.find(name);
      require_sound(tensor != nullptr, common, "'{}' is missing", name);
      require_sound(tensor->shape == p.shape && tensor->dtype == "F32", common,
                    "'{}' is {} of {}, expected {} of F32", name, shape_text(tensor->shape), tensor->dtype,
                    shape_text(p.shape));
    }
  }
  for (const Piece& piece : moment_pieces(rank)) load(rank.stream, common, *common.find(piece.tensor), piece);
  auto restore_state = [&](const SafetensorsReader& file, const TensorState& state) {
    const Piece piece = piece_of(state, rank);
    const Tensor* tensor = file.find(piece.tensor);
    const bool fits =
        tensor != nullptr && tensor->dtype == name(state.dtype) && tensor->elements == state.count();
    // Without state of the same codec, the codec keeps its initial state.
    require_sound(fits || !same_codec || head.world == 1, file,
                  "'{}' is missing or has another shape or type", piece.tensor);
    if (fits) load(rank.stream, file, *tensor, piece);
  };
  for (const TensorState& state : states) {
    if (state.same_on_all_ranks) restore_state(common, state);
  }

  std::vector<std::unique_ptr<SafetensorsReader>> files;
  for (int from : merged_ranks(me, world, head.world)) {
    files.push_back(std::make_unique<SafetensorsReader>(state_path(head.path, from, head.world)));
    const SafetensorsReader& file = *files.back();
    file.verify(true);
    check_same_checkpoint(head, file);
    const Json of = about_of(file)["rank"];
    require_sound(of == from, file, "it is the state of rank {}", of.dump());
    for (const TensorState& state : states) {
      const bool mine = !state.same_on_all_ranks && state.kind != kResidualKind;
      if (mine && head.world == world) restore_state(file, state);
    }
  }
  // Dion's residual is the momentum, for any rank and format.
  const bool keeps = same_codec || (config.uses_dion() && head.compression.starts_with("dion:"));
  Residuals left;  // one tensor at a time, because all residuals take as much memory as the model
  for (size_t i = 0; i < rank.parameters.size(); ++i) {
    const VitParameter& p = rank.parameters[i];
    Residuals sum;
    for (const auto& file : files) {
      const Tensor* tensor = file->find(fmt::format("{}.{}", kResidualKind, p.name));
      if (tensor == nullptr) continue;
      require_sound(tensor->shape == p.shape && tensor->dtype == "F32", *file,
                    "'{}' has another shape or type", tensor->name);
      std::vector<float> values(static_cast<size_t>(tensor->elements));
      file->read(*tensor, 0, values);
      add_residual(sum[i], values.data(), tensor->elements);
    }
    left.merge(take_left_over(sum, keeps ? states : std::vector<TensorState>()));
    if (!sum.empty()) load_residuals(rank.stream, rank.reducer, std::move(sum), keeps);
  }
  const bool left_over = load_residuals(rank.stream, rank.reducer, std::move(left), false);
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

std::string gradients_path(const std::string& directory, int64_t step) {
  return fmt::format("{}/gradients-step-{}.safetensors", directory, step);
}

GradientDump::GradientDump(const TrainConfig& config, const std::vector<VitParameter>& parameters,
                           const ParameterLayout& layout, Device device)
    : config_(config),
      parameters_(parameters),
      layout_(layout),
      copies_(Buffer::pinned(device, static_cast<size_t>(layout.elements) * sizeof(float))) {
  std::fill_n(copies_.as<float>(), layout.elements, 0.0f);  // the gaps between tensors
}

void GradientDump::take(const Stream& stream, int i, const float* gradient) {
  const auto at = static_cast<size_t>(i);
  copy(stream, copies_.as<float>() + layout_.offsets[at], gradient,
       static_cast<size_t>(parameters_[at].elements()) * sizeof(float));
}

std::vector<float> GradientDump::values() const {
  const auto* begin = copies_.as<const float>();
  return {begin, begin + layout_.elements};
}

void GradientDump::write() const {
  const std::string path = gradients_path(config_.gradients_directory, config_.gradients_step);
  try {
    write_file(path);
  } catch (const std::exception& error) {
    lose_output(path, fmt::format("{}: {}", path, error.what()));
  }
}

void GradientDump::write_file(const std::string& path) const {
  std::error_code error;
  std::filesystem::create_directories(config_.gradients_directory, error);
  require<Error>(!error, "{}: cannot be created: {}", config_.gradients_directory, error.message());
  std::vector<SafetensorsWriter::Entry> entries;
  for (const VitParameter& parameter : parameters_) entries.push_back({parameter.name, parameter.shape});
  const nlohmann::ordered_json about{{"gradients_of_step", config_.gradients_step},
                                     {"rank", 0},
                                     {"world", config_.ranks()},
                                     {"model", config_.model.name},
                                     {"data", config_.data.to_string()},
                                     {"seed", config_.seed},
                                     {"compression", config_.compression.to_string()}};
  const std::string unfinished = temporary_name_beside(path);
  try {
    SafetensorsWriter file(unfinished, {{"format", "pt"}, {"gradwire", about.dump()}}, entries);
    for (size_t i = 0; i < parameters_.size(); ++i) {
      file.write(
          {copies_.as<const float>() + layout_.offsets[i], static_cast<size_t>(parameters_[i].elements())});
    }
    file.finish();
    std::filesystem::rename(unfinished, path);
  } catch (...) {
    std::filesystem::remove(unfinished, error);
    throw;
  }
}

}  // namespace gradwire
