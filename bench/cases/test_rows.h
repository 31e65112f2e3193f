// Rows on which gradwire-bench evaluates wire formats: random values, or gradients of a training step.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace gradwire::bench {

struct Row {
  std::string name;  // name of a tensor; "" for random values
  std::vector<float> values;
  double squared_norm = 0;
};

struct RowSet {
  std::string name;  // "gaussian", "gradients", ...
  std::vector<Row> rows;
};

// Returns rows with increasingly heavy tails: Gaussian, Student-t with 3 degrees of freedom, and log-normal
// values with random signs (the exponential of a standard normal value); `rows` of `elements` each. The same
// seed gives the same values.
std::vector<RowSet> random_rows(int64_t rows, int64_t elements, uint64_t seed);

// Returns the tensors of all *.safetensors files in a folder, such as the output of gradwire train
// --dump-gradients. Omits empty and all-zero tensors, which have no relative error. Throws BadInput, which
// names the file, if a tensor is not F32 and finite, or if no tensor remains.
RowSet gradient_rows(const std::string& directory);

}  // namespace gradwire::bench
