// Measures the error and bias of one encode and decode in a wire format.
#pragma once

#include <string>

#include "bench/cases/test_rows.h"
#include "collectives/spec/spec.h"

namespace gradwire::bench {

struct RowError {
  double error = 0;  // squared error of an encode and decode / squared norm of the row
  // bias: norm of the mean error over many draws / norm of the row. by_chance: the expected bias of an
  // unbiased format; 0 for round to nearest, whose draws are all equal.
  double bias = 0, by_chance = 0;
  bool random = false;  // true if the draws differ
  double bytes_per_element = 0;
};

struct RowSetError {
  std::vector<RowError> rows;
  double mean = 0, standard_error = 0;  // statistics of `error` over the rows; NaN for a single row
  double total = 0;                     // sum of squared errors / sum of squared norms
  double bias = 0, by_chance = 0;       // bias of all rows combined
  bool random = false;
  double bytes_per_element = 0;
  size_t worst = 0;  // the row with the largest error
};

// Measures the error of each row of `set`, on the host. `draws`, at least 2: number of encodes of each row,
// for formats that round stochastically.
RowSetError round_trip_error(const CompressionSpec& spec, const RowSet& set, int draws, uint64_t seed);

}  // namespace gradwire::bench
