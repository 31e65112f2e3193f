// Rows of values on which gradwire-bench judges wire formats: random ones, or gradients of a training step.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace gradwire::bench {

struct Row {
  std::string name;  // of a tensor; "" for random values
  std::vector<float> values;
  double squared_norm = 0;
};

struct RowSet {
  std::string name;  // "gaussian", "gradients", ...
  std::vector<Row> rows;
};

// Gaussian, Student-t with 3 degrees of freedom, and log-normal values with random signs (the exponential of
// a standard normal value), which have ever heavier tails: `rows` of `elements` each. The same seed gives the
// same values.
std::vector<RowSet> random_rows(int64_t rows, int64_t elements, uint64_t seed);

// The tensors of all *.safetensors files in a folder, such as gradwire train --dump-gradients writes; tensors
// without elements and those that are all zero, which have no relative error, are left out. Throws BadInput,
// which names the file, unless they are F32 and finite, and something is left.
RowSet gradient_rows(const std::string& directory);

}  // namespace gradwire::bench
