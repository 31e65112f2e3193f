#include "bench/cases/test_rows.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <numeric>
#include <random>

#include "runtime/util/error.h"
#include "trainer/checkpoint/safetensors.h"

namespace gradwire::bench {
namespace {

namespace fs = std::filesystem;

double squared_norm_of(const std::vector<float>& values) {
  return std::transform_reduce(values.begin(), values.end(), 0.0, std::plus<>(),
                               [](float v) { return static_cast<double>(v) * v; });
}

template <typename Draw>
RowSet drawn(const char* name, int64_t rows, int64_t elements, uint64_t seed, Draw draw) {
  RowSet set{name, {}};
  for (int64_t r = 0; r < rows; ++r) {
    std::mt19937_64 generator(seed * 1'000'003 + static_cast<uint64_t>(r));
    Row row{"", std::vector<float>(static_cast<size_t>(elements))};
    auto fresh = draw;  // use a copy for each row, because distributions store a spare value
    for (float& v : row.values) v = fresh(generator);
    row.squared_norm = squared_norm_of(row.values);
    set.rows.push_back(std::move(row));
  }
  return set;
}

std::vector<std::string> safetensors_files(const std::string& directory) {
  std::error_code error;
  if (!fs::is_directory(directory, error)) {
    throw BadInput(fmt::format("--gradients {}: {}", directory,
                               fs::exists(directory, error) ? "not a folder" : "no such folder"));
  }
  std::vector<std::string> paths;
  for (fs::directory_iterator it(directory, error), end; !error && it != end; it.increment(error)) {
    if (it->path().extension() == ".safetensors") paths.push_back(it->path().string());
  }
  if (error) throw BadInput(fmt::format("--gradients {}: {}", directory, error.message()));
  if (paths.empty()) {
    throw BadInput(
        fmt::format("--gradients {}: no *.safetensors in it; gradwire train --dump-gradients STEP:{} "
                    "writes one",
                    directory, directory));
  }
  std::sort(paths.begin(), paths.end());
  return paths;
}

Row read_row(const SafetensorsReader& file, const SafetensorsReader::Tensor& tensor,
             const std::string& name) {
  Row row{name, std::vector<float>(static_cast<size_t>(tensor.elements))};
  file.read(tensor, 0, row.values);
  row.squared_norm = squared_norm_of(row.values);
  if (!std::isfinite(row.squared_norm)) {
    throw BadInput(fmt::format("{}: '{}' has values that are not finite; dump a step in which the loss is",
                               file.path(), tensor.name));
  }
  return row;
}

}  // namespace

std::vector<RowSet> random_rows(int64_t rows, int64_t elements, uint64_t seed) {
  auto log_normal = [normal = std::normal_distribution<float>()](std::mt19937_64& generator) mutable {
    const float magnitude = std::exp(normal(generator));
    return (generator() >> 63) != 0 ? -magnitude : magnitude;
  };
  return {drawn("gaussian", rows, elements, seed, std::normal_distribution<float>()),
          drawn("student-t3", rows, elements, seed, std::student_t_distribution<float>(3)),
          drawn("log-normal", rows, elements, seed, log_normal)};
}

RowSet gradient_rows(const std::string& directory) {
  RowSet set{"gradients", {}};
  const std::vector<std::string> paths = safetensors_files(directory);
  for (const std::string& path : paths) {
    const SafetensorsReader file(path);
    file.verify(false);
    const std::string prefix = paths.size() == 1 ? "" : fs::path(path).stem().string() + ":";
    for (const SafetensorsReader::Tensor& tensor : file.tensors()) {
      Row row = read_row(file, tensor, prefix + tensor.name);
      if (row.squared_norm > 0) set.rows.push_back(std::move(row));
    }
  }
  if (set.rows.empty()) {
    throw BadInput(fmt::format(
        "--gradients {}: the tensors are empty or all values are zero; dump a later step", directory));
  }
  return set;
}

}  // namespace gradwire::bench
