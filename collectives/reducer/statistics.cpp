#include "collectives/reducer/statistics.h"

#include <algorithm>
#include <utility>
#include <vector>

namespace gradwire {

ReducerStats StepMarks::stats(bool timing) const {
  ReducerStats stats;
  stats.wire_bytes = (*bytes_sent)[1] - (*bytes_sent)[0];
  if (!timing) return stats;
  std::vector<std::pair<double, double>> spans;
  for (const BucketPhases& b : buckets) {
    spans.push_back(b.since(buckets[first]));
    stats.compress_ms += b.ms(Phase::compress);
    stats.communicate_ms += b.ms(Phase::communicate);
    stats.decompress_ms += b.ms(Phase::decompress);
  }
  std::sort(spans.begin(), spans.end());  // buckets may have run in another order
  double until = 0;                       // latest end of a bucket so far, in ms since the first bucket began
  for (const auto& [begin, end] : spans) {
    stats.comm_ms += std::max(0.0, end - std::max(begin, until));
    until = std::max(until, end);
  }
  stats.exposed_comm_ms = elapsed_ms(wait_begin, wait_end);
  return stats;
}

}  // namespace gradwire
