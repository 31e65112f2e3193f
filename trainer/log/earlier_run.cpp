#include "trainer/log/earlier_run.h"

#include <fstream>
#include <limits>

#include "trainer/log/json.h"
#include "trainer/log/records.h"

namespace gradwire {
namespace {

double number_in(const Json& json, const char* key) {
  const Json value = json.value(key, Json());
  return value.is_number() ? value.get<double>() : std::numeric_limits<double>::quiet_NaN();
}

std::optional<double> number_or_none(const Json& json, const char* key) {
  const Json value = json.value(key, Json());
  return value.is_number() ? std::optional(value.get<double>()) : std::nullopt;
}

}  // namespace

EarlierRun read_earlier_run(const std::string& path) {
  EarlierRun earlier;
  std::ifstream file(path, std::ios::binary);
  std::string first, line, last;
  if (!std::getline(file, first)) return earlier;
  earlier.settings = settings_text(first);
  if (earlier.settings.empty()) return earlier;
  while (std::getline(file, line)) last = line;
  const Json end = Json::parse(last, nullptr, false);
  if (!end.is_object() || end.value("type", Json()) != "summary") return earlier;
  const Json head = Json::parse(first);
  earlier.finished = true;
  RunSummary& summary = earlier.summary;
  summary.steps = end.value("steps", int64_t{0});
  summary.seconds = number_in(end, "seconds");
  summary.final_loss = number_in(end, "final_loss");
  summary.test_loss = number_or_none(end, "test_loss");
  summary.test_accuracy = number_or_none(end, "test_accuracy");
  summary.step_ms = number_in(end, "step_ms");
  summary.images_per_s = number_in(end, "images_per_s");
  summary.wire_bytes = number_in(end, "wire_bytes");
  summary.dense_bytes = number_in(end, "dense_bytes");
  summary.exposed_comm_ms = number_in(end, "exposed_comm_ms");
  summary.ratio = number_or_none(end, "ratio");
  summary.schedule = head.value("schedule", "");
  summary.parameters = head.value("parameters", int64_t{0});
  return earlier;
}

}  // namespace gradwire
