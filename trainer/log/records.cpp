#include "trainer/log/records.h"

#include <cmath>
#include <nlohmann/json.hpp>

namespace gradwire {
namespace {

using Json = nlohmann::ordered_json;

std::string line(const Json& json, int indent = -1) {
  // NaN and infinity become null; bytes that are not UTF-8 (a path may hold anything) are replaced.
  return json.dump(indent, ' ', false, Json::error_handler_t::replace);
}

Json or_null(const std::optional<double>& value) {
  return value ? Json(*value) : Json(nullptr);
}

Json shares_json(const StepShares& shares) {
  Json json{{"data", shares.data},           {"forward", shares.forward},
            {"backward", shares.backward},   {"exposed_comm", shares.exposed_comm},
            {"optimizer", shares.optimizer}, {"other", shares.other}};
  json["compress"] = shares.compress;
  json["communicate"] = shares.communicate;
  json["decompress"] = shares.decompress;
  json["hidden_of_comm"] = or_null(shares.hidden_of_comm());
  return json;
}

// 25 rather than 25.0.
Json shortest(double value) {
  return value == std::floor(value) ? Json(static_cast<int64_t>(value)) : Json(value);
}

Json model_json(const VitConfig& model) {
  return {{"name", model.name},   {"image_size", model.image}, {"channels", model.channels},
          {"patch", model.patch}, {"width", model.width},      {"depth", model.depth},
          {"heads", model.heads}, {"mlp", model.mlp},          {"classes", model.classes}};
}

void add_config(Json& json, const TrainConfig& config) {
  json["model"] = model_json(config.model);
  json["data"] = config.data.to_string();
  json["augment"] = config.augment.to_string();
  json["ranks"] = config.ranks();
  json["ranks_per_node"] = config.ranks_per_node;
  json["device"] = config.devices.empty() || config.devices[0].is_host() ? "host" : "cuda";
  json["devices"] = Json::array();
  for (Device device : config.devices) json["devices"].push_back(device.name());
  json["ranks_are"] = config.processes ? "processes" : "threads";
  json["compression"] = config.compression.to_string();
  json["bucket_mb"] = shortest(config.bucket_mb);
  json["gradient_views"] = config.gradient_views;
  json["batch_size"] = config.batch_size;
  json["accumulate"] = config.accumulate;
  json["steps"] = config.steps;
  json["epochs"] = config.epochs;
  json["optimizer"] = name(config.optimizer);
  json["lr"] = config.lr;
  json["warmup_steps"] = config.warmup_steps;
  if (config.optimizer == OptimizerKind::sgd) {
    json["momentum"] = config.momentum;
  } else {
    json["beta1"] = config.beta1;
    json["beta2"] = config.beta2;
    json["eps"] = config.eps;
  }
  json["weight_decay"] = config.weight_decay;
  json["precision"] = name(config.precision);
  json["graph"] = config.graph;
  json["seed"] = config.seed;
  json["eval_every"] = config.eval_every;
  json["eval_batch_size"] = config.eval_batch_size;
  json["timeout_s"] = config.timeout_s;
  auto path_or_null = [](const std::string& path) { return path.empty() ? Json(nullptr) : Json(path); };
  json["init"] = path_or_null(config.init);
  json["resume"] = path_or_null(config.resume);
  json["checkpoint"] = path_or_null(config.checkpoint_directory);
  json["checkpoint_every"] = config.checkpoint_every;
  json["checkpoint_keep"] = config.checkpoint_keep;
  json["dump_gradients"] =
      config.gradients_directory.empty()
          ? Json(nullptr)
          : Json(std::to_string(config.gradients_step) + ":" + config.gradients_directory);
  json["trace"] = path_or_null(config.trace);
  auto range_or_null = [](StepRange range) {
    return range.empty() ? Json(nullptr) : Json(range.to_string());
  };
  json["trace_steps"] = range_or_null(config.trace_steps);
  json["profile_steps"] = range_or_null(config.profile_steps);
}

}  // namespace

std::string run_record(const TrainConfig& config, const DataSplits& data, const RunInfo& info) {
  Json json{{"type", "run"}, {"schema", kRecordSchema}, {"version", GRADWIRE_VERSION}};
  add_config(json, config);
  json["train_images"] = data.train.count();
  json["test_images"] = data.test.count();
  json["parameters"] = info.parameters;
  json["tensors"] = info.tensors;
  json["buckets"] = info.buckets;
  json["schedule"] = info.schedule;
  json["schedule_reason"] = info.schedule_reason;
  json["reducer_extra_bytes"] = info.reducer_extra_bytes;
  json["peak_tflops"] = info.peak_tflops;
  json["copy_gb_per_s"] = info.copy_gb_per_s;
  json["fma_share"] = info.fma_share;
  json["products"] = info.products.empty() ? Json(nullptr) : Json(info.products);
  return line(json);
}

std::string step_record(const StepRecord& step) {
  return line(Json{{"type", "step"},
                   {"step", step.step},
                   {"epoch", step.epoch},
                   {"loss", step.loss},
                   {"lr", step.lr},
                   {"step_ms", step.step_ms},
                   {"images_per_s", step.images_per_s},
                   {"wire_bytes", step.wire_bytes},
                   {"dense_bytes", step.dense_bytes},
                   {"comm_ms", step.comm_ms},
                   {"compress_ms", step.compress_ms},
                   {"communicate_ms", step.communicate_ms},
                   {"decompress_ms", step.decompress_ms},
                   {"exposed_comm_ms", step.exposed_comm_ms},
                   {"data_ms", step.data_ms},
                   {"forward_ms", step.forward_ms},
                   {"backward_ms", step.backward_ms},
                   {"optimizer_ms", step.optimizer_ms},
                   {"tflops", step.tflops}});
}

std::string eval_record(const EvalRecord& eval) {
  return line(Json{{"type", "eval"},
                   {"step", eval.step},
                   {"epoch", eval.epoch},
                   {"test_loss", eval.test_loss},
                   {"test_accuracy", eval.test_accuracy},
                   {"images", eval.images}});
}

std::string checkpoint_record(const CheckpointRecord& checkpoint) {
  return line(Json{{"type", "checkpoint"},
                   {"step", checkpoint.step},
                   {"path", checkpoint.path},
                   {"bytes", checkpoint.bytes},
                   {"save_ms", checkpoint.save_ms}});
}

std::string resume_record(const TrainConfig& config, const RunInfo& info) {
  return line(Json{{"type", "resume"},
                   {"step", info.first_step},
                   {"path", config.resume},
                   {"version", GRADWIRE_VERSION},
                   {"ranks", config.ranks()},
                   {"compression", config.compression.to_string()}});
}

bool is_run_record(const std::string& line) {
  const Json json = Json::parse(line, nullptr, false);
  return json.is_object() && json.value("type", Json()) == "run";
}

bool is_before(const std::string& line, int64_t first_step, int64_t steps) {
  const Json json = Json::parse(line, nullptr, false);
  if (!json.is_object()) return false;
  const Json type = json.value("type", Json()), step = json.value("step", Json());
  if (type == "run") return true;
  if (!step.is_number_integer()) return false;
  if (type == "step") return step.get<int64_t>() < first_step;
  // A run resumed after its last step repeats its evaluation.
  if (type == "eval" && first_step == steps) return step.get<int64_t>() < first_step;
  return step.get<int64_t>() <= first_step;
}

std::string summary_record(const RunSummary& summary) {
  return line(Json{{"type", "summary"},
                   {"steps", summary.steps},
                   {"seconds", summary.seconds},
                   {"final_loss", summary.final_loss},
                   {"test_loss", or_null(summary.test_loss)},
                   {"test_accuracy", or_null(summary.test_accuracy)},
                   {"step_ms", summary.step_ms},
                   {"images_per_s", summary.images_per_s},
                   {"wire_bytes", summary.wire_bytes},
                   {"dense_bytes", summary.dense_bytes},
                   {"ratio", or_null(summary.ratio)},
                   {"comm_ms", summary.comm_ms},
                   {"compress_ms", summary.compress_ms},
                   {"communicate_ms", summary.communicate_ms},
                   {"decompress_ms", summary.decompress_ms},
                   {"exposed_comm_ms", summary.exposed_comm_ms},
                   {"data_ms", summary.data_ms},
                   {"forward_ms", summary.forward_ms},
                   {"backward_ms", summary.backward_ms},
                   {"optimizer_ms", summary.optimizer_ms},
                   {"data_wait_share", summary.data_wait_share},
                   {"tflops", summary.tflops},
                   {"peak_fraction", or_null(summary.peak_fraction)},
                   {"shares", shares_json(summary.shares)},
                   {"total_wire_bytes", summary.total_wire_bytes}});
}

std::string config_text(const TrainConfig& config) {
  Json json = Json::object();
  add_config(json, config);
  return line(json, 2);
}

std::string compare_document(const std::vector<ComparedRun>& runs) {
  Json document = Json::array();
  for (const ComparedRun& run : runs) {
    document.push_back({{"compression", run.compression},
                        {"test_accuracy", or_null(run.summary.test_accuracy)},
                        {"final_loss", run.summary.final_loss},
                        {"step_ms", run.summary.step_ms},
                        {"images_per_s", run.summary.images_per_s},
                        {"wire_bytes", run.summary.wire_bytes},
                        {"dense_bytes", run.summary.dense_bytes},
                        {"ratio", or_null(run.summary.ratio)},
                        {"exposed_comm_ms", run.summary.exposed_comm_ms},
                        {"ranks", run.ranks},
                        {"device", run.device},
                        {"schedule", run.summary.schedule},
                        {"bucket_mb", shortest(run.bucket_mb)}});
  }
  return line(document, 2) + "\n";
}

}  // namespace gradwire
