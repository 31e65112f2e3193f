#include "trainer/config/config.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <iterator>
#include <sstream>
#include <string_view>

#include "collectives/transport/transport.h"
#include "runtime/util/error.h"
#include "runtime/util/file.h"
#include "runtime/util/parse.h"
#include "trainer/config/settings.h"

namespace gradwire {
namespace {

// torchvision's models (Dosovitskiy et al., arXiv 2010.11929, table 1; vit_s has the shape of DeiT-S), and
// vit_tiny for 28x28 images, small enough for a laptop's CPU.
const std::vector<VitConfig>& known_models() {
  static const std::vector<VitConfig> models{
      {"vit_tiny", 28, 1, 7, 64, 4, 4, 256, 10},          {"vit_s_16", 224, 3, 16, 384, 12, 6, 1536, 1000},
      {"vit_b_16", 224, 3, 16, 768, 12, 12, 3072, 1000},  {"vit_b_32", 224, 3, 32, 768, 12, 12, 3072, 1000},
      {"vit_l_16", 224, 3, 16, 1024, 24, 16, 4096, 1000}, {"vit_l_32", 224, 3, 32, 1024, 24, 16, 4096, 1000},
  };
  return models;
}

}  // namespace

std::vector<std::string> model_names() {
  std::vector<std::string> names;
  for (const auto& model : known_models()) names.push_back(model.name);
  return names;
}

VitConfig named_model(const std::string& name) {
  for (const auto& model : known_models()) {
    if (model.name == name) return model;
  }
  const std::vector<std::string> names = model_names();
  throw BadInput(
      "unknown model '{}'{}; use one of {}; --image-size, --patch, --width, --depth, --heads and --mlp "
      "change "
      "its shape",
      name, suggestion(name, {names.begin(), names.end()}), fmt::join(names, ", "));
}

void check_model(const VitConfig& model) {
  for (const Setting& setting : settings()) {
    const auto* size = std::get_if<int32_t VitConfig::*>(&setting.field);
    if (size == nullptr || (model.**size >= 1 && model.**size <= setting.values.most)) continue;
    throw BadInput("model {}: {} is {}; it must be from 1 to {}", model.name, setting.flag, model.**size,
                   setting.values.most);
  }
  if (model.image % model.patch != 0) {
    std::vector<int32_t> fitting;
    for (int32_t patch = 1; patch <= model.image; ++patch) {
      if (model.image % patch == 0) fitting.push_back(patch);
    }
    throw BadInput("model {}: patches of {} pixels do not tile images of {}; --patch must be one of {}",
                   model.name, model.patch, model.image, fmt::join(fitting, ", "));
  }
  if (model.width % model.heads != 0) {
    throw BadInput("model {}: --width {} is not a multiple of --heads {}", model.name, model.width,
                   model.heads);
  }
}

DataSpec DataSpec::parse(const std::string& text) {
  size_t colon = text.find(':');
  std::string kind = text.substr(0, colon);
  std::string rest = colon == std::string::npos ? "" : text.substr(colon + 1);
  auto bad = [&](const std::string& why) {
    throw BadInput("--data '{}': {}; use fashion-mnist[:DIR], cifar10:DIR or synthetic[:N]", text, why);
  };
  DataSpec spec;
  if (kind == "fashion-mnist") {
    spec.kind = Kind::fashion_mnist;
  } else if (kind == "cifar10") {
    spec.kind = Kind::cifar10;
  } else if (kind == "synthetic") {
    spec.kind = Kind::synthetic;
  } else {
    bad(fmt::format("unknown data '{}'{}", kind,
                    suggestion(kind, {"fashion-mnist", "cifar10", "synthetic"})));
  }
  if (colon != std::string::npos && rest.empty()) bad("nothing after ':'");
  if (spec.kind == Kind::synthetic) {
    if (colon == std::string::npos) return spec;
    const auto count = parse_number<int64_t>(rest, 1, 100'000'000);
    if (!count) bad(fmt::format("'{}' is not a number of images from 1 to 100000000", rest));
    spec.count = *count;
    return spec;
  }
  if (spec.kind == Kind::cifar10 && rest.empty()) bad("cifar10 needs the folder of its binary files");
  spec.directory = rest;
  return spec;
}

std::string DataSpec::to_string() const {
  if (kind == Kind::synthetic) return count == 0 ? "synthetic" : fmt::format("synthetic:{}", count);
  std::string word = kind == Kind::fashion_mnist ? "fashion-mnist" : "cifar10";
  return directory.empty() ? word : fmt::format("{}:{}", word, directory);
}

Augmentation Augmentation::parse(const std::string& text) {
  Augmentation augment;
  if (text == "none") return augment;
  size_t begin = 0;
  while (begin <= text.size()) {
    const size_t end = std::min(text.find(',', begin), text.size());
    const std::string word = text.substr(begin, end - begin);
    bool* which = word == "flip" ? &augment.flip : word == "crop" ? &augment.crop : nullptr;
    if (which == nullptr || *which) {
      throw BadInput("--augment '{}': '{}' is {}; use none, flip, crop or flip,crop", text, word,
                     which == nullptr ? "unknown" : "given twice");
    }
    *which = true;
    begin = end + 1;
  }
  return augment;
}

std::string Augmentation::to_string() const {
  if (!any()) return "none";
  return flip && crop ? "flip,crop" : flip ? "flip" : "crop";
}

StepRange StepRange::parse(const std::string& flag, const std::string& text) {
  const auto steps = parse_pair<int64_t>(text, ':', 0);
  const StepRange range = steps ? StepRange{steps->first, steps->second} : StepRange{};
  if (range.empty()) {
    throw BadInput(
        "{} '{}' is not a range of steps a:b; 10:20 means the ten steps from 10 to 19, counted from 0", flag,
        text);
  }
  return range;
}

ElasticRange ElasticRange::parse(const std::string& text) {
  const auto ranks = parse_pair(text, ':', 1);
  if (!ranks || ranks->first > ranks->second) {
    throw BadInput(
        "--elastic '{}' is not a range of ranks MIN:MAX[,keep-local]; 2:4 means that a run of at "
        "most 4 ranks "
        "continues while 2 are left",
        text);
  }
  return {ranks->first, ranks->second};
}

std::string ElasticRange::to_string() const {
  return fmt::format("{}:{}", least, most);
}

std::string StepRange::to_string() const {
  return fmt::format("{}:{}", begin, end);
}

const char* name(OptimizerKind kind) {
  return kind == OptimizerKind::sgd ? "sgd" : "adamw";
}
const char* name(ElasticBatch batch) {
  return batch == ElasticBatch::keep_global ? "keep-global" : "keep-local";
}
const char* name(Gelu gelu) {
  return gelu == Gelu::exact ? "exact" : "tanh";
}
const char* name(Precision precision) {
  return precision == Precision::fp32 ? "fp32" : precision == Precision::tf32 ? "tf32" : "bf16";
}

namespace {

constexpr const char* kMagic = "gradwire-members-1";

}  // namespace

std::string members_text(int launched, const std::string& invitation) {
  return fmt::format("{} {}\n{}", kMagic, launched, invitation);
}

Members read_members(const std::string& path) {
  std::string text;
  try {
    text = read_regular_file(path);
    if (text.empty()) throw BadInput(path + ": the file is empty");
  } catch (const BadInput& error) {
    throw BadInput(
        "{}; name the file that the run's --members names, or that is in its "
        "--checkpoint folder; the file exists from the first step to the end",
        error.what());
  }
  std::istringstream lines(text);
  std::string magic, launched;
  lines >> magic >> launched;
  lines.ignore();  // skip the end of the line
  const auto ranks = parse_number(launched, 1, kMaxRanks);
  if (magic != kMagic || !ranks) {
    throw BadInput(path + ": not a list of a run's ranks; name the file of the run's --members");
  }
  Members members{.launched = *ranks};
  members.invitation.assign(std::istreambuf_iterator<char>(lines), {});
  return members;
}

}  // namespace gradwire
