#include "trainer/train/saved_plan.h"

#include <fmt/format.h>

#include <filesystem>

#include "runtime/util/error.h"
#include "runtime/util/file.h"
#include "runtime/util/output_file.h"
#include "trainer/checkpoint/head.h"
#include "trainer/log/json.h"
#include "trainer/log/records.h"

namespace gradwire {
namespace {

constexpr const char* kType = "gradwire plan 1";
// The settings that a plan is for.
constexpr const char* kSettings[] = {"model", "ranks", "device"};

[[noreturn]] void refuse_plan(const std::string& path, const std::string& why) {
  throw BadInput(
      fmt::format("--compression auto:plan={}: {}; name another file, or remove this one to measure "
                  "again",
                  path, why));
}

double number_of(const Json& json, const char* key, const std::string& path) {
  const double number = number_in(json, key);
  if (!std::isfinite(number)) refuse_plan(path, fmt::format("damaged: no number '{}'", key));
  return number;
}

}  // namespace

std::optional<SavedPlan> SavedPlan::read(const std::string& path, const TrainConfig& config) {
  if (std::error_code ignored; !std::filesystem::exists(path, ignored)) return {};
  const Json json = parse_json(read_regular_file(path));
  if (!json.is_object() || json.value("type", Json()) != kType)
    refuse_plan(path, "not a plan of this version");
  const Json own = Json::parse(config_text(config));
  for (const char* key : kSettings) {
    const Json theirs = json.value(key, Json());
    if (theirs == own[key]) continue;
    const auto text = [](const Json& value) {
      return value.is_object() ? value.value("name", Json()).dump() : value.dump();
    };
    std::string other = text(theirs);
    if (other == text(own[key])) other += " of another size";
    refuse_plan(path, fmt::format("the plan is for {} {}, this run has {}", key, other, text(own[key])));
  }
  const Json predicted = json.value("predicted", Json()), choice = json.value("choice", Json());
  const auto compression = field<std::string>(json, "compression");
  if (!predicted.is_object() || !choice.is_object() || !compression) refuse_plan(path, "damaged");
  const auto ms = [&](const char* key) { return number_of(predicted, key, path); };
  SavedPlan plan{.compression = *compression,
                 .bucket_mb = number_of(json, "bucket_mb", path),
                 .links = links_of(json.value("links", Json())),
                 .predicted = {{ms("compute_ms"), ms("kernels_ms"), ms("links_ms"), ms("exposed_ms"),
                                ms("optimizer_ms"), ms("step_ms")},
                               ms("low_ms"),
                               ms("high_ms")},
                 .choice = json_text(choice)};
  if (!(plan.bucket_mb > 0)) refuse_plan(path, "damaged: bucket_mb is not a size");
  CompressionSpec::parse(plan.compression);
  return plan;
}

void SavedPlan::write(const std::string& path, const TrainConfig& config) const {
  const Json own = Json::parse(config_text(config));
  Json json{{"type", kType}};
  for (const char* key : kSettings) json[key] = own[key];
  json["compression"] = compression;
  json["bucket_mb"] = shortest(bucket_mb);
  if (links) json["links"] = links_json(*links);
  const StepParts& p = predicted.parts;
  json["predicted"] = {{"compute_ms", p.compute_ms},     {"kernels_ms", p.kernels_ms},
                       {"links_ms", p.links_ms},         {"exposed_ms", p.exposed_ms},
                       {"optimizer_ms", p.optimizer_ms}, {"step_ms", p.step_ms},
                       {"low_ms", predicted.low_ms},     {"high_ms", predicted.high_ms}};
  json["choice"] = Json::parse(choice);
  OutputFile(path).write(json_text(json, 2) + "\n");
}

}  // namespace gradwire
