// Which run a process belongs to, as far as anybody has said so. Ranks of two runs can meet at one port by mistake, and
// would train with each other; where both ends know their run and the runs differ, they are refused by name.
#pragma once

#include <functional>
#include <string>

namespace gradwire {

// GRADWIRE_JOB, or the id that the launcher gives each of its processes: "Slurm job 123, step 0". The same on all ranks
// of a run. Empty where nothing says it; that goes with any run. Throws BadInput for a text that is too long.
std::string job_from_environment();
// The same with `lookup` in place of getenv(); null: not set.
std::string job_of(const std::function<const char*(const char*)>& lookup);

// Part of what a rank of another run is told.
inline constexpr const char* kOtherJob = "belongs to another run";

}  // namespace gradwire
