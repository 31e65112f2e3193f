// `gradwire top`: follows a run by its log.
#pragma once

#include <string>

namespace gradwire {

struct TopOptions {
  std::string log;
  bool once = false, prometheus = false;
};

// Returns when the run has ended or, with `once` or without a terminal, after one look. Throws BadInput if the file
// cannot be read or is no run's log.
void top(const TopOptions& options);

}  // namespace gradwire
