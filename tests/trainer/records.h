// Records of a small run.
#pragma once

#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "trainer/data/dataset.h"
#include "trainer/log/summary.h"
#include "trainer/train/run.h"

namespace gradwire::testing {

inline TrainConfig record_config() {
  TrainConfig c;
  c.devices = {Device::host(), Device::host()};
  c.compression = CompressionSpec::parse("powersgd:rank=4");
  c.steps = 3;
  return c;
}

inline RunInfo run_info(const std::string& schedule) {
  RunInfo info;
  info.parameters = 5;
  info.buckets = 1;
  info.schedule = schedule;
  return info;
}

inline ComparedRun compared_run(const std::string& compression, const RunSummary& summary) {
  ComparedRun run;
  run.compression = compression;
  run.seeds = {{0, summary, ""}};
  run.ranks = 4;
  run.device = "host";
  return run;
}

inline DataSplits record_data() {
  return make_synthetic(VitConfig{}, 20, 10, 0);
}

inline StepRecord record_step(int64_t index, double loss, uint64_t wire = 100) {
  StepRecord s;
  s.step = index;
  s.loss = loss;
  s.step_ms = 10.0 + static_cast<double>(index);
  s.images_per_s = 1000;
  s.wire_bytes = wire;
  s.dense_bytes = 400;
  s.exposed_comm_ms = 1.5;
  s.data_ms = index == 0 ? 4 : 0;
  s.tflops = 0.5;
  return s;
}

inline std::vector<nlohmann::json> records_in(const std::string& path) {
  std::ifstream file(path);
  std::vector<nlohmann::json> records;
  for (std::string text; std::getline(file, text);) records.push_back(nlohmann::json::parse(text));
  return records;
}

}  // namespace gradwire::testing
