// Statistics of a row's samples, and the rule that ends a measurement.
#pragma once

#include <string>
#include <vector>

namespace gradwire::bench {

// When a measurement ends: with at least `samples` samples, after at least `min_s` seconds, once the standard
// error of the mean is at most `error` of the mean; and in any case after `max_s` seconds, but not before
// kLeastSamples samples.
struct StopRule {
  static constexpr int kLeastSamples = 3;

  double error = 0.005;
  int samples = 10;
  double min_s = 0.5, max_s = 15;
  int exactly = 0;  // if not 0: the number of samples; the other fields are ignored

  // Parses "error=1%,samples=20,min=100ms,max=5s", of which every part may be missing, a number of samples,
  // such as "20", or a time, such as "50ms". Throws BadInput.
  static StopRule parse(const std::string& text);
  std::string to_string() const;
};

// Which part of a rule ended a measurement.
enum class Stopped { error, samples, time };
const char* name(Stopped stopped);

// The statistics of a row, in microseconds.
struct Timing {
  int n = 0;
  double min_us = 0, q1_us = 0, median_us = 0, q3_us = 0;
  double noise = 0;  // standard deviation / mean
  Stopped stopped = Stopped::samples;
  double sm_mhz = 0;      // mean SM clock of a GPU during the measurement; 0: unknown
  std::string throttled;  // reasons of a lower clock, "none", or "" if unknown

  double iqr_us() const { return q3_us - q1_us; }
};

// The samples of one measurement.
class Samples {
 public:
  void add(double us);
  // Returns whether `rule` ends the measurement after `elapsed_s` seconds.
  bool done(const StopRule& rule, double elapsed_s);
  // Returns the statistics. All 0 without samples.
  Timing timing() const;

 private:
  double relative_deviation() const;

  std::vector<double> us_;
  double mean_ = 0, squares_ = 0;  // squares_: sum of the squared differences to the mean
  Stopped stopped_ = Stopped::samples;
};

// Returns the quantile `p`, from 0 to 1, of sorted values, interpolated between neighbors.
double quantile(const std::vector<double>& sorted, double p);
// Returns the smallest value that is at least `percent` percent of the sorted values (nearest rank).
double percentile(const std::vector<double>& sorted, int percent);
// Returns the statistics of a fixed number of samples.
Timing summarize(const std::vector<double>& samples_us);

}  // namespace gradwire::bench
