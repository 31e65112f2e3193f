// What one training step leaves behind until it is read: marks on the rank's stream, and times of its thread.
#pragma once

#include <cstdint>
#include <vector>

#include "runtime/device.h"
#include "runtime/trace.h"

namespace gradwire {

struct TrainingMarks {
  // Of one micro-batch: beginnings of the three phases, and the end of the last.
  struct Micro {
    Event data, forward, backward, done;
  };
  int64_t step = -1;
  SteadyTime enqueue_begin, enqueue_end, wait_begin, wait_end;  // of the thread
  std::vector<Micro> micros;                                    // config.accumulate of them
  Event reduced, end;                                           // gradients averaged; parameters updated
};

}  // namespace gradwire
