#include "trainer/log/records.h"

#include "runtime/util/parse.h"
#include "trainer/log/json.h"

namespace gradwire {
namespace {

// The first measured field of a run's first record. The fields before it are settings, in a fixed order.
constexpr const char* kFirstMeasured = "parameters";

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

Json parts_json(const StepParts& p) {
  return {{"compute_ms", p.compute_ms}, {"kernels_ms", p.kernels_ms},     {"links_ms", p.links_ms},
          {"exposed_ms", p.exposed_ms}, {"optimizer_ms", p.optimizer_ms}, {"step_ms", p.step_ms}};
}

Json predicted_json(const RunSummary& summary) {
  if (!summary.predicted) return nullptr;
  Json json = parts_json(summary.predicted->parts);
  json["step_interval_ms"] = {summary.predicted->low_ms, summary.predicted->high_ms};
  json["measured"] = parts_json(summary.measured);
  json["inside"] = summary.predicted->holds(summary.measured.step_ms);
  return json;
}

Json model_json(const VitConfig& model) {
  Json json{{"name", model.name},   {"image_size", model.image}, {"channels", model.channels},
            {"patch", model.patch}, {"width", model.width},      {"depth", model.depth},
            {"heads", model.heads}, {"mlp", model.mlp},          {"classes", model.classes}};
  // Readers take the exact form if the field is absent.
  if (model.gelu != Gelu::exact) json["gelu"] = name(model.gelu);
  return json;
}

void add_optimizer(Json& json, const TrainConfig& config) {
  json["optimizer"] = config.uses_dion() ? "dion" : config.muon ? "muon" : name(config.optimizer);
  json["lr"] = config.lr;
  if (config.uses_dion()) json["dion_lr"] = config.dion_lr;
  if (config.muon) {
    json["muon_lr"] = config.dion_lr;
    json["mu"] = config.muon_mu;
  }
  json["warmup_steps"] = config.warmup_steps;
  if (config.optimizer == OptimizerKind::sgd) {
    json["momentum"] = config.momentum;
  } else {
    json["beta1"] = config.beta1;
    json["beta2"] = config.beta2;
    json["eps"] = config.eps;
  }
  json["weight_decay"] = config.weight_decay;
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
  if (config.link) json["link"] = config.link.to_string();
  if (config.elastic) {
    json["elastic"] = config.elastic.to_string();
    json["elastic_batch"] = name(config.elastic_batch);
  }
  json["compression"] = config.compression.to_string();
  json["bucket_mb"] = shortest(config.bucket_mb);
  json["shard"] = config.shard_optimizer ? "optimizer" : "none";
  json["gather_weights"] = config.gather_weights->name;
  json["memory_limit"] = config.memory_limit == 0 ? Json(nullptr) : Json(config.memory_limit);
  json["overlap_forward"] = config.overlap_forward;
  json["gradient_group"] = config.gradient_group;
  json["batch_size"] = config.batch_size;
  if (config.shared_batch > 0) json["shared_batch"] = config.shared_batch;
  json["accumulate"] = config.accumulate;
  json["steps"] = config.steps;
  json["epochs"] = config.epochs;
  add_optimizer(json, config);
  json["precision"] = name(config.precision);
  json["graph"] = config.graph;
  json["seed"] = config.seed;
  json["eval_every"] = shortest(config.eval_every);
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
}

}  // namespace

std::string run_record(const TrainConfig& config, const DataSplits& data, const RunInfo& info) {
  Json json{{"type", "run"}, {"schema", kRecordSchema}, {"version", GRADWIRE_VERSION}};
  add_config(json, config);
  json["train_images"] = data.train.count();
  json["test_images"] = data.test.count();
  json[kFirstMeasured] = info.parameters;
  json["tensors"] = info.tensors;
  json["buckets"] = info.buckets;
  json["schedule"] = info.schedule;
  json["schedule_reason"] = info.schedule_reason;
  json["reducer_extra_bytes"] = info.reducer_extra_bytes;
  json["peak_tflops"] = info.peak_tflops;
  json["copy_gb_per_s"] = info.copy_gb_per_s;
  json["fma_share"] = info.fma_share;
  json["products"] = info.products.empty() ? Json(nullptr) : Json(info.products);
  return json_text(json);
}

std::string step_record(const StepRecord& step) {
  return json_text(Json{{"type", "step"},
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

std::string waits_record(const WaitRecord& waits) {
  return json_text(Json{
      {"type", "waits"}, {"step", waits.step}, {"seconds", waits.seconds}, {"waited_s", waits.waited_s}});
}

std::string shrink_record(const ShrinkRecord& shrink) {
  return json_text(Json{{"type", "shrink"},
                        {"step", shrink.step},
                        {"lost", shrink.lost},
                        {"lost_residual_norms", shrink.lost_residual_norms},
                        {"ranks", shrink.ranks},
                        {"global_batch", shrink.global_batch},
                        {"lr", shrink.lr},
                        {"seconds", shrink.seconds},
                        {"why", shrink.why},
                        {"goes_back", shrink.goes_back}});
}

std::string grow_record(const GrowRecord& grow) {
  return json_text(Json{{"type", "grow"},
                        {"step", grow.step},
                        {"joined", grow.joined},
                        {"ranks", grow.ranks},
                        {"global_batch", grow.global_batch},
                        {"lr", grow.lr},
                        {"seconds", grow.seconds}});
}

std::string eval_record(const EvalRecord& eval) {
  return json_text(Json{{"type", "eval"},
                        {"step", eval.step},
                        {"epoch", eval.epoch},
                        {"seconds", eval.seconds},
                        {"test_loss", eval.test_loss},
                        {"test_accuracy", eval.test_accuracy},
                        {"images", eval.images}});
}

std::string checkpoint_record(const CheckpointRecord& checkpoint) {
  return json_text(Json{{"type", "checkpoint"},
                        {"step", checkpoint.step},
                        {"path", checkpoint.path},
                        {"bytes", checkpoint.bytes},
                        {"save_ms", checkpoint.save_ms}});
}

std::string resume_record(const TrainConfig& config, const RunInfo& info) {
  return json_text(Json{{"type", "resume"},
                        {"step", info.first_step},
                        {"path", config.resume},
                        {"version", GRADWIRE_VERSION},
                        {"ranks", config.ranks()},
                        {"compression", config.compression.to_string()}});
}

bool is_run_record(const std::string& line) {
  const Json json = parse_json(line);
  return json.is_object() && json.value("type", Json()) == "run";
}

bool is_before(const std::string& line, int64_t first_step, bool evaluates) {
  const Json json = parse_json(line);
  if (!json.is_object()) return false;
  const Json type = json.value("type", Json()), step = json.value("step", Json());
  if (type == "run") return true;
  if (!step.is_number_integer()) return false;
  if (type == "step") return step.get<int64_t>() < first_step;
  if (type == "eval" && evaluates) return step.get<int64_t>() < first_step;
  return step.get<int64_t>() <= first_step;
}

std::string summary_record(const RunSummary& summary) {
  return json_text(Json{{"type", "summary"},
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
                        {"total_wire_bytes", summary.total_wire_bytes},
                        {"memory_bytes", summary.memory_bytes},
                        {"waited_s", summary.waited_s},
                        {"predicted", predicted_json(summary)}});
}

std::string config_text(const TrainConfig& config) {
  Json json = Json::object();
  add_config(json, config);
  return json_text(json, 2);
}

std::string settings_text(const std::string& run_record) {
  const Json json = parse_json(run_record);
  if (!json.is_object() || json.value("type", Json()) != "run") return "";
  Json settings = Json::object();
  for (const auto& [key, value] : json.items()) {
    if (key == kFirstMeasured) break;
    const bool only_watches =
        key == "timeout_s" || key == "trace" || key == "trace_steps" || key == "dump_gradients";
    if (!only_watches) settings[key] = value;
  }
  return json_text(settings);
}

}  // namespace gradwire
