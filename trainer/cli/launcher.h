// Which launcher, if any, started this process: torchrun, Slurm or mpirun leave variables behind.
#pragma once

#include <functional>
#include <optional>
#include <string>

namespace gradwire {

struct Launch {
  std::string launcher;   // "torchrun", "Slurm", "mpirun (Open MPI)", ...
  std::string variables;  // "RANK=1 WORLD_SIZE=4"
  int rank = 0, world = 1;
};

// Looks variables up through `lookup` (null: not set). Throws BadInput when a launcher's variables contradict
// themselves.
std::optional<Launch> detect_launcher(const std::function<const char*(const char*)>& lookup);

// The same for this process. Throws BadInput when several processes were launched: each would train alone.
std::optional<Launch> check_launcher();

}  // namespace gradwire
