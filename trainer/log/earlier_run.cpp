#include "trainer/log/earlier_run.h"

#include <filesystem>
#include <fstream>

#include "trainer/log/json.h"
#include "trainer/log/records.h"

namespace gradwire {
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
