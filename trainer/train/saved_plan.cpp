#include "trainer/train/saved_plan.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <limits>

#include "collectives/codec/policy_codec.h"
#include "runtime/util/error.h"
#include "runtime/util/file.h"
#include "trainer/checkpoint/head.h"
#include "trainer/log/console.h"
#include "trainer/log/records.h"
#include "trainer/model/parameters.h"
#include "trainer/train/memory_plan.h"

namespace gradwire {
namespace {

constexpr const char* kType = "gradwire plan 1";
constexpr uintmax_t kMostBytes = 100'000'000;  // a plan of 1024 ranks has about 60 MB, for its links
constexpr double kMostBucketMb = 1 << 20;      // of --bucket-mb
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

// Returns the measured error of one encode with the plan's spec, or NaN.
double recorded_error(const Json& choice, const std::string& spec) {
  const Json prediction = choice.value("prediction", Json());
  const Json rows = prediction.is_object() ? prediction.value("best", Json()) : Json();
  for (const Json& row : rows) {
    if (row.is_object() && row.value("compression", Json()) == spec) return number_in(row, "error");
  }
  return std::numeric_limits<double>::quiet_NaN();
}

// Refuses a plan that this run's request could not have chosen.
void check_choice(const SavedPlan& plan, const Json& choice, const AutoCompression& request,
                  const TrainConfig& config, std::optional<double> bucket_mb) {
  const std::string& path = request.plan;
  std::vector<std::string> specs;
  for (const CompressionSpec& spec : request.candidates()) specs.push_back(spec.to_string());
  std::string candidate;
  try {
    candidate = request.candidate_of(plan.compression);
    std::vector<std::string> tensors;
    for (const VitParameter& p : vit_parameters(config.model)) tensors.push_back(p.name);
    check_dense_names(CompressionSpec::parse(plan.compression), tensors);
  } catch (const BadInput& error) {
    refuse_plan(path, error.what());
  }
  if (candidate.empty()) {
    refuse_plan(path, fmt::format("auto may choose {}, not '{}'", fmt::join(specs, ", "), plan.compression));
  }
  const double error = recorded_error(choice, plan.compression);
  if (candidate != specs[0] && !(error <= request.error)) {  // FP32 is always allowed
    refuse_plan(path, fmt::format("the error of {} is {}, more than error={}", plan.compression,
                                  std::isfinite(error) ? fmt::format("{:.3g}", error) : "not recorded",
                                  request.error));
  }
  if (!(plan.bucket_mb >= 1 && plan.bucket_mb <= kMostBucketMb) ||
      plan.bucket_mb != std::floor(plan.bucket_mb)) {
    refuse_plan(path, fmt::format("bucket_mb {} is not a whole number of MiB from 1 to {}", plan.bucket_mb,
                                  kMostBucketMb));
  }
  if (bucket_mb && plan.bucket_mb != *bucket_mb) {
    refuse_plan(
        path, fmt::format("the plan has buckets of {} MiB, not --bucket-mb {}", plan.bucket_mb, *bucket_mb));
  }
  if (config.memory_limit == 0) return;
  TrainConfig planned = config;
  planned.compression = CompressionSpec::parse(plan.compression);
  planned.bucket_mb = plan.bucket_mb;
  const int64_t bytes = plan_memory(planned).total();
  if (bytes <= config.memory_limit) return;
  const auto text = [](int64_t b) { return human_bytes(static_cast<double>(b)); };
  refuse_plan(path, fmt::format("{} with buckets of {} MiB needs {} per rank, more than --memory-limit {}",
                                plan.compression, plan.bucket_mb, text(bytes), text(config.memory_limit)));
}

}  // namespace

std::optional<SavedPlan> SavedPlan::read(const AutoCompression& request, const TrainConfig& config,
                                         std::optional<double> bucket_mb) {
  const std::string& path = request.plan;
  std::error_code ignored;
  if (!std::filesystem::exists(path, ignored)) return {};
  if (const auto bytes = std::filesystem::file_size(path, ignored); !ignored && bytes > kMostBytes)
    refuse_plan(path, fmt::format("{} bytes are too many for a plan", bytes));
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
  check_choice(plan, choice, request, config, bucket_mb);
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
