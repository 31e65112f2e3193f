// Log records: one line of JSON each; docs/formats.md describes every field. A number that is not finite
// becomes null, because JSON has no NaN or infinity.
#pragma once

#include <nlohmann/json.hpp>

#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <type_traits>
#include <vector>

#include "runtime/util/file.h"
#include "trainer/config/settings.h"
#include "trainer/data/dataset.h"
#include "trainer/log/observer.h"
#include "trainer/log/summary.h"

namespace gradwire {

constexpr int kRecordSchema = 1;

std::string run_record(const TrainConfig& config, const DataSplits& data, const RunInfo& info);
std::string step_record(const StepRecord& step);
std::string waits_record(const WaitRecord& waits);
std::string eval_record(const EvalRecord& eval);
std::string summary_record(const RunSummary& summary);
Json parts_json(const StepParts& parts);
// Returns the resolved config as indented JSON (--dry-run).
std::string config_text(const TrainConfig& config);

// Returns whether `line` is the first record of a log.
bool is_run_record(const std::string& line);
// Returns whether a line of an old log is retained when a run resumes at step `first_step`. False for records
// that the run will write again, and for incomplete lines. `evaluates`: the run starts with an overdue
// evaluation.
bool is_before(const std::string& line, int64_t first_step, bool evaluates);

// Returns the settings that determine the results of a run, as text, from the first line of the run's log.
// Returns "" for any other line.
std::string settings_text(const std::string& run_record);

// The log of a run: one JSON record per line. Each line is flushed, so that a killed run leaves complete
// lines.

class RunLog final : public RunObserver {
 public:
  // Prepares the log. on_run() opens and locks the file: a run that never starts does not leave a file, and
  // two runs cannot write to the same file. A run that resumes from a checkpoint, or a rank that replaces a
  // lost rank 0, appends to the run's old log, if the file exists. It drops the lines of steps after the
  // checkpoint. If the path is not a regular file, a resumed run starts a new log. A write error does not end
  // the run: the log ends with its last complete line, and lose_output() reports the error. `config` and
  // `data` must outlive the log. `choice`: the record of --compression auto, which follows the first record
  // of a new log; or empty. Throws BadInput when the path cannot be written.
  RunLog(std::string path, const TrainConfig& config, const DataSplits& data, std::string choice = {});

  void on_run(const RunInfo& info) override;
  void on_step(const StepRecord& step) override { write(step_record(step)); }
  void on_waits(const WaitRecord& waits) override { write(waits_record(waits)); }
  void on_group(const GroupRecord& record) override;
  void on_replan(const ReplanRecord& replan) override { write(replan.choice); }
  void on_eval(const EvalRecord& eval) override { write(eval_record(eval)); }
  void on_checkpoint(const CheckpointRecord& record) override;
  void write_summary(const RunSummary& summary) { write(summary_record(summary)); }

 private:
  void write(const std::string& record);
  FileDescriptor open(const RunInfo& info, bool& continues) const;
  std::string kept_until(const RunInfo& info) const;
  std::string path_;
  const TrainConfig& config_;
  const DataSplits& data_;
  const std::string choice_;
  FileDescriptor file_;
};

// Conversion of values to JSON for all output of this folder, and parsing of untrusted JSON.

// Returns JSON text. NaN and infinity become null. Bytes that are not UTF-8 are replaced, because a path can
// contain any bytes.
inline std::string json_text(const Json& json, int indent = -1) {
  return json.dump(indent, ' ', false, Json::error_handler_t::replace);
}

inline Json or_null(const std::optional<double>& value) {
  return value ? Json(*value) : Json(nullptr);
}

// Returns a discarded value (is_discarded(), not an object) if the text is not JSON. Drops values nested
// deeper than Gradwire's output, because printing and comparing such values would overflow the stack.
inline Json parse_json(const std::string& text) {
  constexpr int kDeepest = 50;
  return Json::parse(
      text, [](int depth, Json::parse_event_t, Json&) { return depth <= kDeepest; }, false);
}

// Returns json[key] if the value exists and is a T. T must be one of Json's types (bool, numbers,
// std::string).
template <typename T>
std::optional<T> field(const Json& json, const char* key) {
  const auto at = json.find(key);
  if (at == json.end()) return std::nullopt;
  const bool fits = std::is_same_v<T, std::string> ? at->is_string()
                    : std::is_same_v<T, bool>      ? at->is_boolean()
                    : std::is_floating_point_v<T>  ? at->is_number()
                                                   : at->is_number_integer();
  return fits ? std::optional(at->template get<T>()) : std::nullopt;
}

// Returns json[key], or NaN if the value is not a number.
inline double number_in(const Json& json, const char* key) {
  return field<double>(json, key).value_or(std::numeric_limits<double>::quiet_NaN());
}

// Reads the log of an earlier run, so that `gradwire compare` can continue after an interruption.

struct EarlierRun {
  std::string settings;   // settings_text() of the first line; "" if the file is not a run log
  bool finished = false;  // the log ends with its summary
  RunSummary summary;     // if finished: the fields that a comparison shows; other fields are zero
};

// Reads a log. `settings` is empty if the file does not exist or is not a run log.
EarlierRun read_earlier_run(const std::string& path);

}  // namespace gradwire
