// `gradwire compare`: one run per compression, bucket size and seed, then one table.
#pragma once

#include "trainer/cli/options.h"

namespace gradwire {

// What --preset names, then what --compression adds. Throws BadInput when there is neither.
std::vector<std::string> compared_specs(const Options& options);

// Throws BadInput before the first run starts, and what a run throws. Runs that an earlier call with the same
// --json finished with the same settings are not run again.
void compare(const Options& options);

}  // namespace gradwire
