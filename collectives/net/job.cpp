#include "collectives/net/job.h"

#include <fmt/format.h>

#include <algorithm>

#include "runtime/util/error.h"

namespace gradwire {
namespace {

constexpr size_t kMostBytes = 200;

}  // namespace

std::string job_from_environment(const std::function<const char*(const char*)>& lookup) {
  const auto value = [&](const char* variable) {
    const char* text = lookup(variable);
    return std::string(text == nullptr ? "" : text);
  };
  if (const std::string own = value("GRADWIRE_JOB"); !own.empty()) {
    const bool printable = std::all_of(own.begin(), own.end(), [](unsigned char c) { return c >= ' '; });
    if (own.size() > kMostBytes || !printable) {
      throw BadInput(fmt::format("GRADWIRE_JOB: at most {} bytes, without control characters", kMostBytes));
    }
    return fmt::format("'{}'", own);
  }
  const auto named = [](const char* kind, const std::string& id) {
    return fmt::format("{} {}", kind, id.substr(0, kMostBytes));
  };
  // torchrun names a run "none" unless --rdzv-id or --standalone names it.
  if (const std::string id = value("TORCHELASTIC_RUN_ID"); !id.empty() && id != "none") {
    return named("torchrun's", id);
  }
  // If each launch starts one process, a run's ranks are separate launches, and a launch's id does not
  // identify the run.
  const auto several = [&](const char* processes) {
    const std::string count = value(processes);
    return !count.empty() && count != "1";
  };
  if (several("OMPI_COMM_WORLD_SIZE")) {
    for (const char* variable : {"PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"}) {
      if (const std::string id = value(variable); !id.empty()) return named("mpirun's", id);
    }
  }
  if (const std::string id = value("PMI_JOBID"); !id.empty() && several("PMI_SIZE"))
    return named("mpirun's", id);
  // The parts of a heterogeneous job have separate ids, and all have the id of the first part in this
  // variable.
  std::string job = value("SLURM_HET_JOB_ID");
  if (job.empty()) job = value("SLURM_JOB_ID");
  if (job.empty()) return "";
  const std::string step = value("SLURM_STEP_ID");
  // Hydra's ranks inherit the steps of Hydra's daemons, and some daemons may not be steps.
  const bool by_hydra = several("PMI_SIZE") && !value("MPI_LOCALNRANKS").empty();
  const bool a_step = several("SLURM_STEP_NUM_TASKS") && !step.empty() && !by_hydra;
  return named("Slurm job", a_step ? fmt::format("{}, step {}", job, step) : job);
}

}  // namespace gradwire
