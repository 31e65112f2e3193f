// The run to which a process belongs, if known. Two runs can use the same port by mistake, and their ranks
// would train together. If both ends of a connection know their run and the runs differ, the connection is
// rejected with an error that names both runs.
#pragma once

#include <functional>
#include <string>

#include "runtime/util/environment.h"

namespace gradwire {

// Returns GRADWIRE_JOB, or the launcher's id of the run: "Slurm job 123, step 0". The text is the same on all
// ranks of a run. Returns "" if the run is unknown; an unknown run matches any run. Throws BadInput for a
// text that is too long. `lookup` returns a variable's value; null: not set.
std::string job_from_environment(const std::function<const char*(const char*)>& lookup = environment);

// Part of the error text that rejects a rank of another run.
inline constexpr const char* kOtherJob = "belongs to another run";

}  // namespace gradwire
