// `gradwire compare`: one run per compression, bucket size and seed, then one table.
#pragma once

#include "trainer/cli/flags.h"

namespace gradwire {

// Returns the specs of --compression; `shelf` stands for shelf_specs(), which come first. Throws BadInput
// without specs.
std::vector<std::string> compared_specs(const RunOptions& options);

// Runs the comparison. Throws BadInput before the first run starts, and the exceptions of a run. Skips runs
// that an earlier call with the same --json finished with the same settings.
void compare(const RunOptions& options);

}  // namespace gradwire
