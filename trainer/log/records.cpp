#include "trainer/log/records.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
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

// Adds pairs of a key and a value.
template <typename T, typename... Rest>
void add(Json& json, const char* key, const T& value, const Rest&... rest) {
  json[key] = value;
  if constexpr (sizeof...(rest) > 0) add(json, rest...);
}

// Returns a record of a type, with pairs of a key and a value.
template <typename... Pairs>
std::string record(const char* type, const Pairs&... pairs) {
  Json json{{"type", type}};
  add(json, pairs...);
  return json_text(json);
}

}  // namespace

Json parts_json(const StepParts& parts) {
  Json json;
  for (const StepPart& part : kStepParts) json[part.key] = parts.*part.value;
  return json;
}

std::string run_record(const TrainConfig& config, const DataSplits& data, const RunInfo& info) {
  Json json{{"type", "run"}, {"schema", kRecordSchema}, {"version", GRADWIRE_VERSION}};
  json.update(config_json(config));
  add(json, "train_images", data.train.count(), "test_images", data.test.count(), kFirstMeasured,
      info.parameters, "tensors", info.tensors, "buckets", info.buckets, "schedule", info.schedule,
      "schedule_reason", info.schedule_reason, "reducer_extra_bytes", info.reducer_extra_bytes, "peak_tflops",
      info.peak_tflops, "copy_gb_per_s", info.copy_gb_per_s, "fma_share", info.fma_share, "products",
      info.products.empty() ? Json(nullptr) : Json(info.products), "flags", config.flags);
  return json_text(json);
}

std::string step_record(const StepRecord& step) {
  Json json{{"type", "step"}};
  add(json, "step", step.step, "epoch", step.epoch, "loss", step.loss, "lr", step.lr);
  for (const StepField& f : kStepFields) {
    const double value = step.*f.value;
    json[f.key] = f.whole ? Json(static_cast<uint64_t>(value)) : Json(value);
  }
  return json_text(json);
}

std::string waits_record(const WaitRecord& r) {
  return record("waits", "step", r.step, "seconds", r.seconds, "waited_s", r.waited_s);
}

std::string eval_record(const EvalRecord& r) {
  return record("eval", "step", r.step, "epoch", r.epoch, "seconds", r.seconds, "test_loss", r.test_loss,
                "test_accuracy", r.test_accuracy, "images", r.images);
}

std::string summary_record(const RunSummary& s) {
  Json json{{"type", "summary"}};
  add(json, "steps", s.steps, "seconds", s.seconds, "final_loss", s.final_loss, "test_loss",
      or_null(s.test_loss), "test_accuracy", or_null(s.test_accuracy));
  for (const StepField& f : kStepFields) {
    json[f.key] = s.*f.value;
    if (f.value == &StepValues::dense_bytes) json["ratio"] = or_null(s.ratio);
    if (f.value == &StepValues::optimizer_ms) json["data_wait_share"] = s.data_wait_share;
  }
  Json shares, predicted;
  for (const StepShare& part : kStepShares) {
    shares[part.key] = s.shares.*part.time;
    if (&part == kStepShares + kPhases - 1) shares["other"] = s.other_share;
  }
  shares["hidden_of_comm"] = or_null(s.hidden_of_comm);
  if (s.predicted) {
    predicted = parts_json(s.predicted->parts);
    predicted["step_interval_ms"] = {s.predicted->low_ms, s.predicted->high_ms};
    predicted["measured"] = parts_json(s.measured);
    predicted["inside"] = s.predicted->holds(s.measured.step_ms);
  }
  add(json, "peak_fraction", or_null(s.peak_fraction), "shares", shares, "total_wire_bytes",
      s.total_wire_bytes, "memory_bytes", s.memory_bytes, "waited_s", s.waited_s, "predicted", predicted);
  return json_text(json);
}

std::string config_text(const TrainConfig& config) {
  return json_text(config_json(config), 2);
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

std::string settings_text(const std::string& run_record) {
  const Json json = parse_json(run_record);
  if (!json.is_object() || json.value("type", Json()) != "run") return "";
  Json kept = Json::object();
  for (const auto& [key, value] : json.items()) {
    if (key == kFirstMeasured) break;
    const bool counts = std::ranges::none_of(settings(), [&key = key](const Setting& s) {
      return s.key != nullptr && s.key == key && s.effect == Setting::Effect::none;
    });
    if (counts) kept[key] = value;
  }
  return json_text(kept);
}

RunLog::RunLog(std::string path, const TrainConfig& config, const DataSplits& data, std::string choice)
    : path_(std::move(path)), config_(config), data_(data), choice_(std::move(choice)) {
  OutputFile::would_be_regular(path_);
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
    Json json{{"type", "resume"}};
    add(json, "step", info.first_step, "path", config_.resume, "version", GRADWIRE_VERSION, "schedule",
        info.schedule);
    json.update(config_json(config_));
    write(json_text(json));
  }
}

void RunLog::on_group(const GroupRecord& r) {
  if (r.joined.empty()) {
    write(record("shrink", "step", r.step, "lost", r.lost, "lost_residual_norms", r.lost_residual_norms,
                 "ranks", r.ranks, "global_batch", r.global_batch, "lr", r.lr, "seconds", r.seconds, "why",
                 r.why, "goes_back", r.goes_back));
  } else {
    write(record("grow", "step", r.step, "joined", r.joined, "ranks", r.ranks, "global_batch", r.global_batch,
                 "lr", r.lr, "seconds", r.seconds));
  }
}

void RunLog::on_checkpoint(const CheckpointRecord& r) {
  write(record("checkpoint", "step", r.step, "path", r.path, "bytes", r.bytes, "save_ms", r.save_ms));
}

FileDescriptor RunLog::open(const RunInfo& info, bool& continues) const {
  OutputFile file(path_);
  const OutputFile::Lock lock = info.takes_over ? OutputFile::Lock::steal : OutputFile::Lock::take;
  std::string kept;
  if (file.is_regular() && (info.takes_over || !config_.resume.empty())) kept = kept_until(info);
  continues = !kept.empty();
  return file.begin(kept, lock);
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
  for (const StepField& f : kStepFields) summary.*f.value = number_in(end, f.key);
  summary.ratio = field<double>(end, "ratio");
  summary.schedule = field<std::string>(head, "schedule").value_or("");
  summary.parameters = field<int64_t>(head, "parameters").value_or(0);
  return earlier;
}

}  // namespace gradwire
