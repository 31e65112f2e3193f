// The log of an earlier run, read back: `gradwire compare` goes on where it was stopped.
#pragma once

#include <string>

#include "trainer/log/summary.h"

namespace gradwire {

struct EarlierRun {
  std::string settings;   // settings_text() of its first line; "": not the log of a run
  bool finished = false;  // it ends with its summary
  RunSummary summary;     // if finished: what a comparison shows, other fields are zero
};

// Of a file that does not exist, or is something else, `settings` is empty.
EarlierRun read_earlier_run(const std::string& path);

}  // namespace gradwire
