// Reads the log of an earlier run, so that `gradwire compare` can continue after an interruption.
#pragma once

#include <string>

#include "trainer/log/summary.h"

namespace gradwire {

struct EarlierRun {
  std::string settings;   // settings_text() of the first line; "" if the file is not a run log
  bool finished = false;  // the log ends with its summary
  RunSummary summary;     // if finished: the fields that a comparison shows; other fields are zero
};

// Reads a log. `settings` is empty if the file does not exist or is not a run log.
EarlierRun read_earlier_run(const std::string& path);

}  // namespace gradwire
