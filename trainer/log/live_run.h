// The state of a run according to its log so far, for `gradwire top`.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "trainer/log/stragglers.h"

namespace gradwire {

class LiveRun {
 public:
  // Updates the state from the next line of the log. Throws BadInput if the first line is not a run record.
  void read(const std::string& line);
  // Returns whether the log ends with its summary.
  bool finished() const { return finished_; }

  // Returns the state as readable text: progress, the straggler, and each rank's waits.
  std::string text() const;
  // Returns the state in Prometheus's text format.
  std::string metrics() const;

 private:
  bool begun_ = false, finished_ = false;
  std::string title_;  // "vit_tiny on 4 ranks (processes, host), int8, schedule ring"
  int64_t steps_ = 0, done_ = 0;
  std::optional<size_t> ranks_now_;  // set after ranks were lost or joined
  double loss_ = 0, step_ms_ = 0, images_per_s_ = 0, wire_bytes_ = 0, dense_bytes_ = 0;
  double total_wire_bytes_ = 0;
  std::vector<std::vector<double>> waited_s_;
  WaitHistory waits_;
};

}  // namespace gradwire
