// The times of one training step: marks on the rank's stream, and times of its thread.
#pragma once

#include <cstdint>
#include <vector>

#include "runtime/device.h"
#include "runtime/trace.h"

namespace gradwire {

struct TrainingMarks {
  // One micro-batch: the starts of its three phases, and the end of the last one.
  struct Micro {
    Event data, forward, backward, done;
  };
  int64_t step = -1;
  SteadyTime enqueue_begin, enqueue_end, wait_begin, wait_end;  // of the thread
  std::vector<Micro> micros;                                    // config.accumulate of them
  Event reduced, end;                                           // gradients averaged; parameters updated
};

}  // namespace gradwire
