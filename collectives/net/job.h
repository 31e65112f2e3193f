// The run of a process, if known. Two runs can use the same port by mistake, and their ranks would train
// together. If both ends of a connection know their run and the runs differ, the connection is rejected with
// both names.
#pragma once

#include <functional>
#include <string>

namespace gradwire {

// Returns GRADWIRE_JOB, or the launcher's id: "Slurm job 123, step 0". The same on all ranks of a run. Empty
// if unknown; an unknown run matches any run. Throws BadInput for a text that is too long.
std::string job_from_environment();
// The same, with `lookup` instead of getenv(); null: not set.
std::string job_of(const std::function<const char*(const char*)>& lookup);

// Part of the error text for a rank of another run.
inline constexpr const char* kOtherJob = "belongs to another run";

}  // namespace gradwire
