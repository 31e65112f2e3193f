// Settings for tests of the resolved configuration.
#pragma once

#include <map>
#include <optional>
#include <string>

#include "trainer/cli/flags.h"
#include "trainer/cli/launcher.h"

namespace gradwire::testing {

// Returns a run of 4 ranks on the host, with synthetic images.
inline RunOptions synthetic() {
  RunOptions o;
  o.data_text = "synthetic:400";
  o.device = DeviceChoice::host;
  o.rank_count = 4;
  o.batch_size = 10;
  return o;
}

// Returns the launcher that these environment variables describe.
inline std::optional<Launch> launched_with(const std::map<std::string, std::string>& variables) {
  return detect_launcher([&](const char* name) {
    auto found = variables.find(name);
    return found == variables.end() ? nullptr : found->second.c_str();
  });
}

}  // namespace gradwire::testing
