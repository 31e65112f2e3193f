// The times of one training step: marks on the rank's stream, and times on the rank's thread.
#pragma once

#include <cstdint>
#include <vector>

#include "runtime/device/device.h"
#include "runtime/trace/trace.h"

namespace gradwire {

struct TrainingMarks {
  // The marks of a micro-batch: the starts of the three phases, and the end of the last phase.
  struct Micro {
    Event data, forward, backward, done;
  };
  // --overlap-forward: the wait for a bucket's gradients, and the update of the bucket's weights.
  struct Update {
    Event wait, begin, end;
  };
  int64_t step = -1;
  SteadyTime enqueue_begin, enqueue_end, wait_begin, wait_end;  // times on the thread
  std::vector<Micro> micros;                                    // config.accumulate elements
  Event reduced, end;           // the gradients are averaged; the parameters are updated
  std::vector<Update> updates;  // one per bucket; empty without --overlap-forward
  // Parameters are updated inside the next forward, not after this step's backward.
  bool updated_in_forward = false;

  double backward_ms() const {
    double ms = 0;
    for (const Micro& micro : micros) ms += elapsed_ms(micro.backward, micro.done);
    return ms;
  }
};

}  // namespace gradwire
