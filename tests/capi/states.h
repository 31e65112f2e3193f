// Helpers for tests that load a reducer's state into a group of another size.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "tests/capi/ranks.h"

namespace capi {

// Returns the residuals in a state, in the order of the model's tensors; zeros for missing residuals.
inline std::vector<double> residuals_of(const std::vector<char>& state, const Model& model) {
  size_t at = 0;
  auto number = [&](size_t bytes) {
    uint64_t value = 0;
    std::memcpy(&value, state.data() + at, bytes);
    at += bytes;
    return value;
  };
  auto text = [&](size_t bytes) {
    at += bytes;
    return std::string(state.data() + at - bytes, bytes);
  };
  std::map<std::string, std::vector<float>> by_name;
  at = 32;
  const uint64_t tensors = number(4), identity = number(4);
  at += identity;
  for (uint64_t i = 0; i < tensors; ++i) {
    at += 16;  // skips rows and cols
    const uint64_t entries = number(8), name_bytes = number(8);
    const std::string name = text(name_bytes);
    for (uint64_t e = 0; e < entries; ++e) {
      const std::string dtype = text(8).c_str();
      const uint64_t count = number(8), kind_bytes = number(8);
      const std::string kind = text(kind_bytes);
      EXPECT_EQ(dtype, "F32");
      if (kind == "residual") {
        by_name[name].resize(count);
        std::memcpy(by_name[name].data(), state.data() + at, count * 4);
      }
      at += count * 4;
    }
  }
  EXPECT_EQ(at, state.size());
  std::vector<double> all;
  for (size_t i = 0; i < model.names.size(); ++i) {
    std::vector<float>& values = by_name[model.names[i]];
    values.resize(model.count(i));
    all.insert(all.end(), values.begin(), values.end());
  }
  return all;
}

inline std::vector<float> gradients_of(const Model& model, int rank, int step) {
  return normal(static_cast<int64_t>(model.elements()), static_cast<uint32_t>(1000 * rank + step + 1));
}

// The values of one rank before and after a step.
struct StepRecord {
  std::vector<float> gradient = {}, mean = {};
  std::vector<double> before = {}, after = {};  // residuals
};

inline StepRecord recorded_step(const Reducer& reducer, const Model& model, std::vector<float> gradient) {
  StepRecord record{.gradient = gradient, .before = residuals_of(reducer.save(), model)};
  GW_EXPECT_OK(reducer.step(gradient));
  record.mean = std::move(gradient);
  record.after = residuals_of(reducer.save(), model);
  return record;
}

// Returns the distance of the records of all ranks from
//   sum of residuals after + world * mean == sum of gradients and residuals before,
// relative to the largest element of the right side.
inline double conservation_error(const std::vector<StepRecord>& ranks) {
  double most = 0, error = 0;
  for (size_t e = 0; e < ranks[0].mean.size(); ++e) {
    double in = 0, out = static_cast<double>(ranks.size()) * ranks[0].mean[e];
    for (const StepRecord& r : ranks) {
      in += r.gradient[e] + r.before[e];
      out += r.after[e];
    }
    most = std::max(most, std::abs(in));
    error = std::max(error, std::abs(in - out));
  }
  return error / most;
}

inline double norm_of(const std::vector<double>& values) {
  double squares = 0;
  for (const double v : values) squares += v * v;
  return std::sqrt(squares);
}

}  // namespace capi
