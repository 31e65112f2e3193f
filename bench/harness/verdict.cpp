#include "bench/harness/verdict.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

namespace gradwire::bench {
namespace {

constexpr double kGap = 0.01, kCenters = 0.02, kSpread = 0.05, kOverlap = 0.5;
constexpr int kLeastSamples = 10;

struct Reason {
  Verdict verdict;
  std::string why;
};

bool is_above(const Timing& upper, const Timing& lower) {
  return upper.min_us > lower.q3_us * (1 + kGap);
}

Reason judge(const Timing& before, const Timing& after) {
  if (const int n = std::min(before.n, after.n); n < kLeastSamples) {
    return {Verdict::unsure, fmt::format("{} samples; at least {} are needed", n, kLeastSamples)};
  }
  if (is_above(after, before)) return {Verdict::slower, ""};
  if (is_above(before, after)) return {Verdict::faster, ""};
  for (const auto& [timing, which] : {std::pair(&before, "A"), std::pair(&after, "B")}) {
    const double spread = timing->iqr_us() / timing->median_us;
    if (spread > kSpread) {
      return {Verdict::unsure, fmt::format("{}'s interquartile range is {:.0f} %", which, 100 * spread)};
    }
  }
  const double centers =
      std::abs(after.median_us - before.median_us) / std::min(after.median_us, before.median_us);
  if (centers > kCenters) {
    return {Verdict::unsure,
            fmt::format("the medians differ by {:.0f} %, but the intervals do not, by {:.0f} %",
                        100 * centers, 100 * kGap)};
  }
  const double shared = std::min(before.q3_us, after.q3_us) - std::max(before.min_us, after.min_us);
  const double shorter = std::min(before.q3_us - before.min_us, after.q3_us - after.min_us);
  if (shared < kOverlap * shorter) return {Verdict::unsure, "the intervals hardly overlap"};
  return {Verdict::same, ""};
}

Timing in_cycles(Timing timing) {
  for (double* us : {&timing.min_us, &timing.q1_us, &timing.median_us, &timing.q3_us}) *us *= timing.sm_mhz;
  return timing;
}

}  // namespace

const char* name(Verdict verdict) {
  switch (verdict) {
    case Verdict::same:
      return "SAME";
    case Verdict::faster:
      return "FASTER";
    case Verdict::slower:
      return "SLOWER";
    case Verdict::unsure:
      break;
  }
  return "UNSURE";
}

Comparison compare(const Timing& before, const Timing& after) {
  const Reason time = judge(before, after);
  Comparison result;
  result.verdict = result.time = time.verdict;
  result.why = time.why;
  if (before.sm_mhz <= 0 || after.sm_mhz <= 0) return result;
  result.has_cycles = true;
  result.cycles = judge(in_cycles(before), in_cycles(after)).verdict;
  if (result.cycles == result.time) return result;
  result.verdict = Verdict::unsure;
  if (result.why.empty()) {
    result.why = fmt::format("{} in cycles: the SM clock was {:.0f} and {:.0f} MHz", name(result.cycles),
                             before.sm_mhz, after.sm_mhz);
  }
  return result;
}

}  // namespace gradwire::bench
