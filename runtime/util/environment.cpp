#include "runtime/util/environment.h"

#include <cstddef>
#include <cstdlib>
#include <string_view>

#include "runtime/util/error.h"

namespace gradwire {
namespace {

constexpr EnvironmentVariable kOwn[] = {
    {"GRADWIRE_THREADS", "the cores this process may use, divided among the processes of a machine",
     "Host threads that compute at once, from 1 to 4096"},
    {"GRADWIRE_BLAS_KERNELS", "what suits the processor",
     "OpenBLAS's kernels for products on the host: Prescott, Haswell, Zen, SkylakeX, ..."},
    {"GRADWIRE_DATA", "Debian's folder of Fashion-MNIST",
     "Folder with the files of `--data fashion-mnist`, or with a folder that has them (docs/formats.md); an "
     "error if "
     "there are none"},
    {"GRADWIRE_SECRET", "none",
     "Whoever knows it may join the run: the same text on every rank. Needed where ranks on several machines "
     "meet "
     "at a tcp:// address (docs/running.md)"},
    {"GRADWIRE_SECRET_FILE", "none",
     "A file that holds it, which only its owner may read; or root's, for a group of this process (mode "
     "440)"},
    {"GRADWIRE_INSECURE", "0", "1: ranks on several machines may meet without a secret"},
    {"GRADWIRE_JOB", "the launcher's",
     "The run's name, the same on every rank: ranks of another run at the same port are refused "
     "(docs/running.md)"},
    {"GRADWIRE_PORTS", "any",
     "Ports at which a process listens for other ranks, such as 20000-20100: the first that is free "
     "(docs/running.md)"},
    {"GRADWIRE_INTERFACE", "from how the ranks meet",
     "The network interface at whose address it listens, such as eth1 (docs/running.md)"},
    {"GRADWIRE_VERIFY_PAYLOAD", "0",
     "1: a checksum after each message that this rank sends over TCP (docs/faults.md)"},
    {"GRADWIRE_TUNING", "cuBLASLt's own choices",
     "A file for the algorithms of products on CUDA: those not in it are timed at first use, and added "
     "(docs/gpu.md). Runs with different files differ in their last bits"},
    {"GRADWIRE_NCCL_LIBRARY", "libnccl.so.2", "The NCCL to load, where it is not found by that name"},
    {"GRADWIRE_BENCH_FLUSH_BYTES", "twice the last-level cache",
     "gradwire-bench: what it writes before timing with cold caches, and the size of its large copies. Less "
     "is "
     "quicker, but no longer cold"},
};

constexpr EnvironmentVariable kInterposer[] = {
    {"GRADWIRE_NCCL_SPEC", "bf16",
     "What ncclAllReduce sends: a wire format of docs/formats.md, with its options; off: as if the "
     "interposer were not there"},
    {"GRADWIRE_NCCL_MIN_BYTES", "1M", "Smaller calls are not compressed; K, M and G are powers of 1024"},
    {"GRADWIRE_NCCL_MAX_STATE_BYTES", "4G",
     "Device memory for residuals per communicator; buffers beyond it go without error feedback"},
    {"GRADWIRE_NCCL_RANKS_PER_NODE", "unknown",
     "For schedule=hierarchical: rank = node x this + local index"},
    {"GRADWIRE_NCCL_DRY_RUN", "off", "1: change nothing, say what would be done"},
};

constexpr EnvironmentVariable kLaunchers[] = {
    {"RANK", "none", "torchrun, or by hand: this process's rank, and the number of ranks"},
    {"WORLD_SIZE", "", ""},
    {"LOCAL_RANK", "none", "The same on this machine: which GPU a rank takes, and how ranks share cores"},
    {"LOCAL_WORLD_SIZE", "", ""},
    {"MASTER_ADDR", "from the launcher", "Rank 0's machine, where the ranks meet"},
    {"MASTER_PORT", "29500", "A free port there"},
    {"TORCHELASTIC_RUN_ID", "none", "torchrun: which run this is; not set where ranks are started by hand"},
    {"TORCHELASTIC_USE_AGENT_STORE", "off",
     "torchrun: its agent uses MASTER_PORT, so the ranks meet 100 ports further"},
    {"OMPI_COMM_WORLD_RANK", "none", "Open MPI: rank and number of ranks, and both on this machine"},
    {"OMPI_COMM_WORLD_SIZE", "", ""},
    {"OMPI_COMM_WORLD_LOCAL_RANK", "", ""},
    {"OMPI_COMM_WORLD_LOCAL_SIZE", "", ""},
    {"OMPI_MCA_ess_base_jobid", "none",
     "Open MPI: the job, from which the port is derived; which run this is"},
    {"PMIX_NAMESPACE", "", ""},
    {"PMIX_RANK", "none", "PRRTE: rank. An error where no variable gives the number of ranks"},
    {"PMI_RANK", "none", "MPICH, Intel MPI: rank and number of ranks, and both on this machine"},
    {"PMI_SIZE", "", ""},
    {"MPI_LOCALRANKID", "", ""},
    {"MPI_LOCALNRANKS", "", ""},
    {"PMI_JOBID", "none",
     "MPICH: the job, from which (or from the second) the port is derived; which run this is"},
    {"PMI_PORT", "", ""},
    {"SLURM_PROCID", "none", "Slurm: rank and number of ranks of the step, and rank on this machine"},
    {"SLURM_STEP_NUM_TASKS", "", ""},
    {"SLURM_LOCALID", "", ""},
    {"SLURM_NODEID", "none",
     "Slurm: this machine's number in the step, ranks on each machine, and number of machines of the step or "
     "of "
     "its part of a heterogeneous job"},
    {"SLURM_STEP_TASKS_PER_NODE", "", ""},
    {"SLURM_STEP_NUM_NODES", "", ""},
    {"SLURM_CPUS_ON_NODE", "none", "Slurm: with fewer cores than these a rank counts as bound to them"},
    {"SLURM_STEP_NODELIST", "none",
     "Slurm: the ranks meet at the first node of the step; of the job, without a step and for mpirun; of "
     "part 0 of "
     "a heterogeneous job"},
    {"SLURM_JOB_NODELIST", "", ""},
    {"SLURM_JOB_NODELIST_HET_GROUP_0", "", ""},
    {"SLURM_JOB_ID", "none",
     "Slurm: the job, the job that all parts of a heterogeneous job share, and the step, from which the port "
     "is "
     "derived; which run this is"},
    {"SLURM_HET_JOB_ID", "", ""},
    {"SLURM_STEP_ID", "", ""},
    {"SLURM_HET_SIZE", "none", "Slurm: number of parts of a heterogeneous job"},
};

constexpr EnvironmentVariable kNccl[] = {
    {"NCCL_COMM_ID", "none", "host:port where the ranks of rendezvous nccl:// meet"},
};

constexpr EnvironmentGroup kGroups[] = {{"Libraries and commands", kOwn},
                                        {"The NCCL interposer", kInterposer},
                                        {"Set by launchers", kLaunchers},
                                        {"NCCL's own", kNccl}};

}  // namespace

std::span<const EnvironmentGroup> environment_variables() {
  return kGroups;
}

std::string environment_text() {
  std::string text;
  for (const EnvironmentGroup& group : kGroups) {
    text += (text.empty() ? "## " : "\n## ") + std::string(group.title) + "\n\n";
    text += "| variable | when not set | meaning |\n|---|---|---|\n";
    for (size_t i = 0; i < group.variables.size();) {
      const EnvironmentVariable& first = group.variables[i];
      text += std::string("| `") + first.name + "`";
      while (++i < group.variables.size() && *group.variables[i].meaning == '\0')
        text += std::string(", `") + group.variables[i].name + "`";
      text += std::string(" | ") + first.otherwise + " | " + first.meaning + " |\n";
    }
  }
  return text;
}

const char* environment(const char* name) {
  for (const EnvironmentGroup& group : kGroups) {
    for (const EnvironmentVariable& v : group.variables) {
      if (std::string_view(v.name) != name) continue;
      const char* value = std::getenv(name);
      return value == nullptr || *value == '\0' ? nullptr : value;
    }
  }
  throw Error(std::string(name) + " is read but not in the table of runtime/util/environment.cpp");
}

bool environment_flag(const char* name, const std::function<const char*(const char*)>& lookup) {
  const char* text = lookup(name);
  const std::string_view value = text == nullptr ? "" : text;
  if (value != "" && value != "0" && value != "1") {
    throw BadInput(std::string(name) + " must be 0 or 1, not '" + text + "'");
  }
  return value == "1";
}

}  // namespace gradwire
