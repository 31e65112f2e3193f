#include "trainer/checkpoint/head.h"

#include <fmt/format.h>

#include <utility>

#include "trainer/checkpoint/folder.h"
#include "trainer/log/records.h"

namespace gradwire {
namespace {

constexpr int kVersion = 1;
constexpr std::pair<const char*, LinkCosts::Pattern LinkCosts::*> kPatterns[] = {
    {"neighbour", &LinkCosts::neighbour},
    {"all_pairs", &LinkCosts::all_pairs},
    {"intra_node", &LinkCosts::intra_node},
    {"inter_node", &LinkCosts::inter_node},
    {"library", &LinkCosts::library}};

// Returns the values that are equal in all files of a checkpoint. Except for "id", they are also equal in
// files of runs with the same settings. Files of earlier versions have no id.
Json shared_part(const Json& about) {
  Json shared;
  for (const char* key : {"step", "epoch", "images", "world", "compression", "seed", "id"}) {
    shared[key] = about.value(key, Json());
  }
  return shared;
}

}  // namespace

Json links_json(const LinkCosts& links) {
  Json json;
  for (const auto& [name, pattern] : kPatterns) {
    if (pattern == &LinkCosts::library && !links.library_measured) continue;
    json[name] = {(links.*pattern).latency_us, (links.*pattern).bytes_per_us};
  }
  return json;
}

std::optional<LinkCosts> links_of(const Json& json) {
  if (!json.is_object()) return {};
  LinkCosts links;
  links.measured = true;
  links.library_measured = json.contains("library");
  for (const auto& [name, pattern] : kPatterns) {
    if (pattern == &LinkCosts::library && !links.library_measured) continue;
    const Json pair = json.value(name, Json());
    if (!pair.is_array() || pair.size() != 2 || !pair[0].is_number() || !pair[1].is_number()) return {};
    links.*pattern = {pair[0].get<double>(), pair[1].get<double>()};
  }
  return links;
}

Json about_file(const TrainConfig& config, const Position& at, int rank, const LinkCosts* links) {
  Json about{{"version", kVersion},
             {"step", at.step},
             {"epoch", at.epoch},
             {"images", at.images},
             {"rank", rank},
             {"world", config.ranks()},
             {"seed", config.seed},
             {"compression", config.compression.to_string()},
             {"config", Json::parse(config_text(config))}};
  if (links != nullptr) about["links"] = links_json(*links);
  return about;
}

Json about_of(const SafetensorsReader& file) {
  const auto text = file.metadata().find(kAboutKey);
  require(text != file.metadata().end(), "{}: not written by gradwire as a checkpoint's state", file.path());
  Json about = parse_json(text->second);
  require(about.is_object(), "{}: damaged: its metadata cannot be parsed", file.path());
  for (const char* key : {"version", "step", "epoch", "images", "rank", "world"}) {
    require(about.value(key, Json()).is_number_unsigned(), "{}: damaged: its metadata has no {}", file.path(),
            key);
  }
  require(about["version"] == kVersion, "{}: has version {}; this build reads version {}", file.path(),
          about["version"].dump(), kVersion);
  require(about.value("config", Json()).is_object() && about.value("compression", Json()).is_string(),
          "{}: damaged: its metadata has no configuration", file.path());
  return about;
}

CheckpointHead read_head(const std::string& checkpoint) {
  const int world = checkpoint_world(checkpoint);
  require(world != 0, "{}: not a complete checkpoint", checkpoint);
  const SafetensorsReader file(state_path(checkpoint, 0, world));
  const Json about = about_of(file);
  auto number = [&](const char* key) { return about[key].get<int64_t>(); };
  CheckpointHead head{.path = checkpoint,
                      .position = {number("step"), number("epoch"), number("images")},
                      .world = world,
                      .compression = about["compression"].get<std::string>(),
                      .bucket_mb = field<double>(about["config"], "bucket_mb").value_or(25),
                      .links = links_of(about.value("links", Json())),
                      .config = about["config"].dump(),
                      .parts = shared_part(about).dump()};
  require(number("world") == world && number("rank") == 0,
          "{}: the file contains rank {} of {}, which contradicts its name", file.path(),
          about["rank"].dump(), about["world"].dump());
  require(head.position.step >= 0 && head.position.epoch >= 0 && head.position.images >= 0,
          "{}: damaged: step, epoch or images is negative", file.path());
  check_same_checkpoint(head, SafetensorsReader(weights_path(checkpoint)));
  return head;
}

void check_same_checkpoint(const CheckpointHead& head, const SafetensorsReader& file) {
  const Json current = Json::parse(head.parts), saved = shared_part(about_of(file));
  for (const auto& [key, value] : current.items()) {
    require(saved[key] == value,
            "{}: the file is from another checkpoint than {}: {} is {}, not {}; restore the folder, or "
            "remove the folder and resume from the previous checkpoint",
            file.path(), state_path(head.path, 0, head.world), key, saved[key].dump(), value.dump());
  }
}

std::vector<std::string> compare_with_head(const TrainConfig& config, const CheckpointHead& head) {
  const Json saved = Json::parse(head.config), current = Json::parse(config_text(config));
  std::vector<std::string> notes, differences;
  for (const Setting& setting : settings()) {
    if (setting.key == nullptr || setting.effect < Setting::Effect::bits) continue;
    const std::string key = setting.key;
    const Json was = value_of(setting, saved), now = value_of(setting, current);
    if (was == now) continue;
    // Without momentum, there is no momentum buffer.
    const bool buffer_differs = key == "momentum" && (was == 0.0) != (now == 0.0);
    if (buffer_differs || setting.effect == Setting::Effect::state) {
      // A checkpoint without the key: shows the whole model.
      const std::string shown = was.is_null() ? key.substr(0, key.find('.')) : key;
      throw BadInput(
          "--resume {}: the checkpoint has {} {}, this run {}; to load only the weights, use --init",
          head.path, shown, was.is_null() ? saved.value(shown, Json()).dump() : was.dump(),
          was.is_null() ? current.value(shown, Json()).dump() : now.dump());
    }
    differences.push_back(fmt::format("{} {}, now {}", key, was.dump(), now.dump()));
  }
  require(head.position.step <= config.steps,
          "--resume {}: the checkpoint is at step {}, the run ends at {}; give more --steps or --epochs",
          head.path, head.position.step, config.steps);
  const Json shard = saved.value("shard", Json("none"));
  require(shard == "none" || shard == "optimizer",
          "--resume {}: the checkpoint has shard {}, expected \"none\" or \"optimizer\"; to load only the "
          "weights, use --init",
          head.path, shard.dump());
  // An allreduce encodes the sum, but a reduce-scatter does not. In an exact format the results are equal.
  if (shard != current["shard"] && !config.compression.wire->exact)
    differences.push_back(fmt::format("shard {}, now {}", shard.dump(), current["shard"].dump()));
  if (head.world != config.ranks()) {
    notes.push_back(
        fmt::format("Note: the checkpoint has {} rank{}, this run {}; the sum of their residuals is kept",
                    head.world, head.world == 1 ? "" : "s", config.ranks()));
  }
  for (const std::string& difference : differences) {
    notes.push_back(
        fmt::format("Note: the checkpoint was made with {}; the run continues with other bits", difference));
  }
  return notes;
}

}  // namespace gradwire
