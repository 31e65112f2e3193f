#include "collectives/reducer/statistics.h"

#include <algorithm>

namespace gradwire {

ReducerStats StepMarks::stats(bool timing) const {
  ReducerStats stats;
  stats.wire_bytes = (*bytes_sent)[1] - (*bytes_sent)[0];
  if (!timing) return stats;
  double until = 0;  // end of the latest bucket so far, since the beginning of the first
  for (const BucketPhases& b : buckets) {
    const auto [begin, end] = b.since(buckets[0]);
    stats.comm_ms += std::max(0.0, end - std::max(begin, until));
    until = std::max(until, end);
    stats.compress_ms += b.ms(Phase::compress);
    stats.communicate_ms += b.ms(Phase::communicate);
    stats.decompress_ms += b.ms(Phase::decompress);
  }
  stats.exposed_comm_ms = elapsed_ms(wait_begin, wait_end);
  return stats;
}

}  // namespace gradwire
