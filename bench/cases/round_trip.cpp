#include "bench/cases/round_trip.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "runtime/device/device.h"

namespace gradwire::bench {
namespace {

// Encodes and decodes one row repeatedly. Each draw uses a different step.
class RoundTrip {
 public:
  RoundTrip(const CompressionSpec& spec, const std::vector<float>& values, uint64_t seed)
      : spec_(spec),
        values_(values),
        seed_(seed),
        wire_(Device::host(), static_cast<size_t>(spec.wire->bytes(count()))),
        decoded_(values.size()) {}

  const std::vector<float>& draw(uint64_t step) {
    if (spec_.wire->exact) return values_;
    spec_.wire->reduce_encode(stream_, {.own = values_.data(),
                                        .wire = wire_.data(),
                                        .count = count(),
                                        .rounding = {.mode = spec_.rounding, .seed = seed_, .step = &step}});
    spec_.wire->decode(stream_, {.wire = wire_.data(), .out = decoded_.data(), .count = count()});
    return decoded_;
  }

 private:
  int64_t count() const { return static_cast<int64_t>(values_.size()); }

  const CompressionSpec& spec_;
  const std::vector<float>& values_;
  uint64_t seed_;
  Stream stream_ = Stream::immediate_host();
  Buffer wire_;
  std::vector<float> decoded_;
};

// Adds the errors to `sums`. Returns their squared norm.
double add_errors(const std::vector<float>& decoded, const std::vector<float>& values,
                  std::vector<double>& sums) {
  double squares = 0;
  for (size_t i = 0; i < values.size(); ++i) {
    const double error = static_cast<double>(decoded[i]) - values[i];
    sums[i] += error;
    squares += error * error;
  }
  return squares;
}

RowError row_error(const CompressionSpec& spec, const Row& row, int draws, uint64_t seed) {
  RoundTrip trip(spec, row.values, seed);
  std::vector<double> sums(row.values.size());
  const std::vector<float> first = trip.draw(0);
  double squares = add_errors(first, row.values, sums);
  RowError result{.error = squares / row.squared_norm};
  const auto count = static_cast<int64_t>(row.values.size());
  result.bytes_per_element = static_cast<double>(spec.wire->bytes(count)) / static_cast<double>(count);
  const std::vector<float>& second = trip.draw(1);
  if (std::memcmp(first.data(), second.data(), first.size() * sizeof(float)) == 0) {
    result.bias = std::sqrt(result.error);
    return result;
  }
  result.random = true;
  squares += add_errors(second, row.values, sums);
  for (int k = 2; k < draws; ++k)
    squares += add_errors(trip.draw(static_cast<uint64_t>(k)), row.values, sums);
  double of_mean = 0;
  for (double sum : sums) of_mean += sum * sum / draws / draws;
  // E |mean error|^2 = |bias|^2 + variance / draws. `noise` is an unbiased estimate of the second term.
  const double noise = std::max(0.0, squares / draws - of_mean) / (draws - 1);
  result.bias = std::sqrt(of_mean / row.squared_norm);
  result.by_chance = std::sqrt(noise / row.squared_norm);
  return result;
}

}  // namespace

RowSetError round_trip_error(const CompressionSpec& spec, const RowSet& set, int draws, uint64_t seed) {
  RowSetError all;
  double norms = 0, elements = 0, bias = 0, by_chance = 0;
  for (const Row& row : set.rows) {
    const RowError e = row_error(spec, row, draws, seed);
    const auto count = static_cast<double>(row.values.size());
    norms += row.squared_norm;
    elements += count;
    all.mean += e.error / static_cast<double>(set.rows.size());
    all.total += e.error * row.squared_norm;
    bias += e.bias * e.bias * row.squared_norm;
    by_chance += e.by_chance * e.by_chance * row.squared_norm;
    all.random = all.random || e.random;
    all.bytes_per_element += e.bytes_per_element * count;
    all.rows.push_back(e);
    if (e.error > all.rows[all.worst].error) all.worst = all.rows.size() - 1;
  }
  all.total /= norms;
  all.bias = std::sqrt(bias / norms);
  all.by_chance = std::sqrt(by_chance / norms);
  all.bytes_per_element /= elements;
  double spread = 0;
  for (const RowError& e : all.rows) spread += (e.error - all.mean) * (e.error - all.mean);
  const auto rows = static_cast<double>(all.rows.size());
  all.standard_error =
      rows < 2 ? std::numeric_limits<double>::quiet_NaN() : std::sqrt(spread / (rows - 1) / rows);
  return all;
}

}  // namespace gradwire::bench
