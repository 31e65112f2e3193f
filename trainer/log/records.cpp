#include "trainer/log/records.h"

#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <fstream>

#include "runtime/util/error.h"
#include "runtime/util/file.h"
#include "runtime/util/parse.h"

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

RunLog::RunLog(std::string path, const TrainConfig& config, const DataSplits& data, std::string choice)
    : path_(std::move(path)), config_(config), data_(data), choice_(std::move(choice)) {
  check_writable(path_);
}

void RunLog::on_run(const RunInfo& info) {
  file_ = FileDescriptor();  // also releases the lock, if this rank returns to a checkpoint
  bool continues = false;
  try {
    file_ = open(info, continues);
  } catch (const Error& error) {
    if (!info.takes_over) throw;
    return lose_output(path_, error.what());  // the run has begun: a missing log must not end it
  }
  if (!continues) {
    write(run_record(config_, data_, info));
    if (!choice_.empty()) write(choice_);
  } else if (!info.takes_over) {
    write(resume_record(config_, info));
  }
}

FileDescriptor RunLog::open(const RunInfo& info, bool& continues) const {
  OutputFile file(path_);
  const OutputFile::Lock lock = info.takes_over ? OutputFile::Lock::steal : OutputFile::Lock::take;
  std::string kept;
  if (file.is_regular() && (info.takes_over || !config_.resume.empty())) kept = kept_until(info);
  continues = !kept.empty();
  return continues ? file.begin_with(kept, lock) : file.begin(lock);
}

// Returns the records of the old log before this run's first step, or "" without an old log.
std::string RunLog::kept_until(const RunInfo& info) const {
  // A run that resumes after its last step repeats its evaluation. A rank that replaces rank 0 may repeat an
  // overdue evaluation.
  const bool evaluates = info.takes_over || info.first_step == config_.steps;
  std::ifstream old(path_, std::ios::binary);
  std::string kept, line;
  while (std::getline(old, line)) {
    if (kept.empty() && !is_run_record(line)) return "";
    if (is_before(line, info.first_step, evaluates)) kept += line + "\n";
  }
  return kept;
}

void RunLog::write(const std::string& record) {
  if (!file_) return;  // the log was lost
  struct stat before {};
  fstat(file_.fd(), &before);
  const int error = write_fully(file_.fd(), record + "\n");
  if (error == 0) return;
  if (S_ISREG(before.st_mode) && ftruncate(file_.fd(), before.st_size) != 0) {
    warn_once(fmt::format("{}: its last line is not complete", path_));
  }
  file_ = FileDescriptor();
  lose_output(path_, fmt::format("{}: writing failed: {}", path_, std::strerror(error)));
}

EarlierRun read_earlier_run(const std::string& path) {
  EarlierRun earlier;
  std::error_code error;
  if (!std::filesystem::is_regular_file(path, error))
    return earlier;  // reading a FIFO would block until a writer opens it
  std::ifstream file(path, std::ios::binary);
  std::string first, line, last;
  if (!std::getline(file, first)) return earlier;
  earlier.settings = settings_text(first);
  if (earlier.settings.empty()) return earlier;
  while (std::getline(file, line)) {
    last = line;
    const Json record = line.starts_with("{\"type\":\"eval\"") ? parse_json(line) : Json();
    if (!record.is_object()) continue;
    earlier.summary.evals.push_back({.step = field<int64_t>(record, "step").value_or(0),
                                     .seconds = number_in(record, "seconds"),
                                     .test_accuracy = number_in(record, "test_accuracy")});
  }
  const Json end = parse_json(last);
  if (!end.is_object() || field<std::string>(end, "type") != "summary") return earlier;
  const Json head = parse_json(first);
  earlier.finished = true;
  RunSummary& summary = earlier.summary;
  summary.steps = field<int64_t>(end, "steps").value_or(0);
  summary.seconds = number_in(end, "seconds");
  summary.final_loss = number_in(end, "final_loss");
  summary.test_loss = field<double>(end, "test_loss");
  summary.test_accuracy = field<double>(end, "test_accuracy");
  summary.step_ms = number_in(end, "step_ms");
  summary.images_per_s = number_in(end, "images_per_s");
  summary.wire_bytes = number_in(end, "wire_bytes");
  summary.dense_bytes = number_in(end, "dense_bytes");
  summary.exposed_comm_ms = number_in(end, "exposed_comm_ms");
  summary.ratio = field<double>(end, "ratio");
  summary.schedule = field<std::string>(head, "schedule").value_or("");
  summary.parameters = field<int64_t>(head, "parameters").value_or(0);
  return earlier;
}

}  // namespace gradwire
