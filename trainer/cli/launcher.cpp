#include "trainer/cli/launcher.h"

#include <charconv>
#include <cstdlib>
#include <string_view>

#include "kernels/error.h"

namespace gradwire {
namespace {

struct Variables {
  const char* launcher;
  const char* rank;
  const char* world;
};

// In order of precedence: torchrun may itself run under Slurm. Slurm's batch script and salloc's shell have
// SLURM_NTASKS although nothing was launched; only a step (srun) has SLURM_STEP_NUM_TASKS.
constexpr Variables kLaunchers[] = {
    {"torchrun", "RANK", "WORLD_SIZE"},
    {"Slurm", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"},
    {"mpirun (Open MPI)", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"},
    {"mpirun (MPICH)", "PMI_RANK", "PMI_SIZE"},
};

int parse(const char* variable, std::string_view text) {
  int value = 0;
  auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || value < 0) {
    throw BadInput(std::string(variable) + "='" + std::string(text) +
                   "' in the environment is not a number; unset it");
  }
  return value;
}

}  // namespace

std::optional<Launch> detect_launcher(const std::function<const char*(const char*)>& lookup) {
  std::optional<Launch> found;
  for (const Variables& v : kLaunchers) {
    const char *rank = lookup(v.rank), *world = lookup(v.world);
    if (world == nullptr) continue;
    Launch launch{v.launcher, std::string(v.world) + "=" + world, 0, parse(v.world, world)};
    if (rank != nullptr) {
      launch.rank = parse(v.rank, rank);
      launch.variables = std::string(v.rank) + "=" + rank + " " + launch.variables;
    }
    if (launch.world < 1 || launch.rank >= launch.world) {
      throw BadInput("the environment contradicts itself: " + launch.variables + " (" + launch.launcher +
                     ")");
    }
    if (!found || (found->world == 1 && launch.world > 1)) found = launch;
  }
  return found;
}

std::optional<Launch> check_launcher() {
  std::optional<Launch> launch = detect_launcher([](const char* variable) { return std::getenv(variable); });
  if (launch && launch->world > 1) {
    throw BadInput(
        "started by " + launch->launcher + " as one of " + std::to_string(launch->world) + " processes (" +
        launch->variables +
        "), but this command trains in one process so far; start one process and use "
        "--ranks " +
        std::to_string(launch->world) + ", or unset these variables");
  }
  return launch;
}

}  // namespace gradwire
