#include "bench/harness/timing.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <optional>

#include "runtime/util/error.h"
#include "runtime/util/parse.h"

namespace gradwire::bench {
namespace {

constexpr int kMostSamples = 1'000'000;
constexpr double kMostSeconds = 86400;

[[noreturn]] void refuse(const std::string& text, const std::string& why) {
  throw BadInput(fmt::format(
      "--stop {}: {}; expected parts of error=0.5%,samples=10,min=0.5s,max=15s, a number of samples such as "
      "20, or a time such as 50ms",
      text, why));
}

// Returns a number before `unit`, or nullopt.
std::optional<double> before(std::string_view text, std::string_view unit, double least, double most) {
  if (!text.ends_with(unit)) return {};
  return parse_number<double>(text.substr(0, text.size() - unit.size()), least, most);
}

std::optional<double> seconds(std::string_view text) {
  if (const auto us = before(text, "us", 0, kMostSeconds * 1e6)) return *us / 1e6;
  if (const auto ms = before(text, "ms", 0, kMostSeconds * 1e3)) return *ms / 1e3;
  return before(text, "s", 0, kMostSeconds);
}

std::string time_text(double s) {
  return s < 1 && s > 0 ? fmt::format("{:g}ms", s * 1e3) : fmt::format("{:g}s", s);
}

}  // namespace

StopRule StopRule::parse(const std::string& text) {
  StopRule rule;
  if (const auto count = parse_number<int>(text, 1, kMostSamples)) {
    rule.exactly = *count;
    return rule;
  }
  if (const auto time = seconds(text)) {
    rule.error = 0;
    rule.samples = kLeastSamples;
    rule.min_s = rule.max_s = *time;
    return rule;
  }
  bool has_min = false;
  const std::string_view all = text;
  for (size_t begin = 0, comma = 0; comma != std::string_view::npos; begin = comma + 1) {
    comma = all.find(',', begin);
    const std::string_view part = all.substr(begin, comma - begin);
    const size_t equals = part.find('=');
    const std::string_view key = part.substr(0, equals);
    const std::string_view value =
        equals == std::string_view::npos ? std::string_view() : part.substr(equals + 1);
    if (const auto percent = before(value, "%", 0, 100); key == "error" && percent) {
      rule.error = *percent / 100;
    } else if (const auto count = parse_number<int>(value, kLeastSamples, kMostSamples);
               key == "samples" && count) {
      rule.samples = *count;
    } else if (const auto time = seconds(value); (key == "min" || key == "max") && time) {
      (key == "min" ? rule.min_s : rule.max_s) = *time;
      has_min = has_min || key == "min";
    } else {
      refuse(text, fmt::format("'{}' is not a part of a rule", part));
    }
  }
  if (!has_min) rule.min_s = std::min(rule.min_s, rule.max_s);
  if (rule.min_s > rule.max_s) refuse(text, "min is more than max");
  return rule;
}

std::string StopRule::to_string() const {
  if (exactly > 0) return fmt::to_string(exactly);
  if (error == 0 && samples == kLeastSamples && min_s == max_s) return time_text(max_s);
  return fmt::format("error={:g}%,samples={},min={},max={}", error * 100, samples, time_text(min_s),
                     time_text(max_s));
}

const char* name(Stopped stopped) {
  return stopped == Stopped::error ? "error" : stopped == Stopped::time ? "time" : "samples";
}

void Samples::add(double us) {
  us_.push_back(us);
  const double difference = us - mean_;
  mean_ += difference / static_cast<double>(us_.size());
  squares_ += difference * (us - mean_);
}

double Samples::relative_deviation() const {
  if (us_.size() < 2 || mean_ <= 0) return 0;
  return std::sqrt(squares_ / static_cast<double>(us_.size() - 1)) / mean_;
}

bool Samples::done(const StopRule& rule, double elapsed_s) {
  const auto n = static_cast<int>(us_.size());
  if (rule.exactly > 0) return n >= rule.exactly;
  if (n < StopRule::kLeastSamples) return false;
  if (elapsed_s >= rule.max_s || n >= kMostSamples) {
    stopped_ = Stopped::time;
    return true;
  }
  if (n < rule.samples || elapsed_s < rule.min_s) return false;
  if (relative_deviation() > rule.error * std::sqrt(n)) return false;
  stopped_ = Stopped::error;
  return true;
}

Timing Samples::timing() const {
  if (us_.empty()) return {};
  std::vector<double> sorted = us_;
  std::sort(sorted.begin(), sorted.end());
  Timing timing;
  timing.n = static_cast<int>(sorted.size());
  timing.min_us = sorted[0];
  timing.q1_us = quantile(sorted, 0.25);
  timing.median_us = quantile(sorted, 0.5);
  timing.q3_us = quantile(sorted, 0.75);
  timing.noise = relative_deviation();
  timing.stopped = stopped_;
  return timing;
}

double quantile(const std::vector<double>& sorted, double p) {
  const double at = p * static_cast<double>(sorted.size() - 1);
  const auto below = static_cast<size_t>(at);
  const size_t above = std::min(below + 1, sorted.size() - 1);
  return sorted[below] + (at - static_cast<double>(below)) * (sorted[above] - sorted[below]);
}

double percentile(const std::vector<double>& sorted, int percent) {
  const size_t rank = (sorted.size() * static_cast<size_t>(percent) + 99) / 100;
  return sorted[std::max<size_t>(rank, 1) - 1];
}

Timing summarize(const std::vector<double>& samples_us) {
  Samples samples;
  for (double us : samples_us) samples.add(us);
  return samples.timing();
}

}  // namespace gradwire::bench
