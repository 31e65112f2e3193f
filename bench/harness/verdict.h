// Compares two measurements of the same work: whether the second is faster, by intervals [min, Q3].
//
// The interval is where a quiet machine's times lie: other work only lengthens times, so the slowest quarter
// is left out. The rules are those of nvbench's robust comparison:
//
//   FASTER, SLOWER   the intervals do not overlap, and the gap is at least 1 % of the lower one's end
//   SAME             the intervals overlap by at least half of the shorter, the medians differ by at most
//                    2 %, and both interquartile ranges are at most 5 % of the median
//   UNSURE           otherwise: fewer than 10 samples, too much noise, or too small a difference
//
// Where the SM clock of both is known, the verdict in cycles must be the same, else the verdict is UNSURE.
#pragma once

#include <string>

#include "bench/harness/timing.h"

namespace gradwire::bench {

enum class Verdict { same, faster, slower, unsure };
const char* name(Verdict verdict);

struct Comparison {
  Verdict verdict = Verdict::unsure, time = Verdict::unsure;
  bool has_cycles = false;
  Verdict cycles = Verdict::unsure;
  std::string why;  // of UNSURE
};

// Reads n, min_us, q1_us, median_us, q3_us and sm_mhz.
Comparison compare(const Timing& before, const Timing& after);

}  // namespace gradwire::bench
