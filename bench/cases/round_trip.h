// What one encode and one decode make of a wire format's input: its error, and its bias.
#pragma once

#include <string>

#include "bench/cases/rows.h"
#include "collectives/spec/spec.h"

namespace gradwire::bench {

struct RowError {
  double error = 0;  // squared error of one encode and decode, over the squared norm
  // Norm of the mean error over many draws, over the norm, and what it would be if the expected error were
  // zero. Draws of round to nearest are all the same: `by_chance` is 0 then.
  double bias = 0, by_chance = 0;
  bool random = false;  // draws differ
  double bytes_per_element = 0;
};

struct RowSetError {
  std::vector<RowError> rows;
  double mean = 0, standard_error = 0;  // of `error` over the rows; NaN: a single row
  double total = 0;                     // all squared errors over all squared norms
  double bias = 0, by_chance = 0;       // of all rows together
  bool random = false;
  double bytes_per_element = 0;
  size_t worst = 0;  // the row with the largest error
};

// On the host. `draws`, at least 2: how many times a format that rounds stochastically encodes each row.
RowSetError round_trip_error(const CompressionSpec& spec, const RowSet& set, int draws, uint64_t seed);

}  // namespace gradwire::bench
