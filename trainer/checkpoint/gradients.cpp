#include "trainer/checkpoint/gradients.h"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "runtime/util/error.h"
#include "runtime/util/file.h"
#include "trainer/checkpoint/safetensors.h"

namespace gradwire {

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
  if (error)
    throw Error(fmt::format("{}: cannot be created: {}", config_.gradients_directory, error.message()));
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
