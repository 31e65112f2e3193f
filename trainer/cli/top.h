// `gradwire top`: follows a run through its log.
#pragma once

#include <string>

namespace gradwire {

struct TopOptions {
  std::string log;
  bool prometheus = false;
};

// Displays the run's state. Returns when the run has ended or, without a terminal, after one reading. Throws
// BadInput if the file cannot be read or is not a run log.
void top(const TopOptions& options);

}  // namespace gradwire
