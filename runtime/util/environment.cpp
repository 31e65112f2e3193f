#include "runtime/util/environment.h"

#include <cstdlib>
#include <cstring>
#include <span>
#include <string_view>

#include "runtime/util/error.h"
#include "runtime/util/file.h"

namespace gradwire {
namespace {

struct EnvironmentVariable {
  std::string_view names;      // one, or several that share a meaning, separated by spaces
  std::string_view otherwise;  // the value that is used when the variable is not set
  std::string_view meaning;
  bool any_line_end = false;  // a carriage return is not an error: the reader ignores the line's end
};

struct EnvironmentGroup {
  const char* title;
  std::span<const EnvironmentVariable> variables;
};

constexpr EnvironmentVariable kOwn[] = {
    {"GRADWIRE_THREADS", "the cores this process may use, divided among the processes of a machine",
     "Host threads that compute at once, from 1 to 4096"},
    {"GRADWIRE_BLAS_KERNELS", "chosen by processor",
     "OpenBLAS's kernels for products on the host: Prescott, Haswell, Zen, SkylakeX, ..."},
    {"GRADWIRE_DATA", "Debian's folder of Fashion-MNIST",
     "Folder with the files of `--data fashion-mnist`, or with a subfolder that contains them "
     "(docs/formats.md); an error if there are none"},
    {"GRADWIRE_SECRET", "none",
     "Text that authenticates the ranks of a run; the same on every rank. Required for ranks on several "
     "machines with a tcp:// rendezvous (docs/running.md)",
     true},
    {"GRADWIRE_SECRET_FILE", "none",
     "File that contains the secret. Only its owner may read it; a file of root may also be readable by a "
     "group of this process (mode 440)"},
    {"GRADWIRE_INSECURE", "0", "1: ranks on several machines may connect without a secret"},
    {"GRADWIRE_JOB", "the launcher's job",
     "Name of the run, the same on every rank: ranks of another run at the same port are rejected "
     "(docs/running.md)"},
    {"GRADWIRE_PORTS", "any",
     "Ports at which a process listens for other ranks, such as 20000-20100: the first free port is used "
     "(docs/running.md)"},
    {"GRADWIRE_INTERFACE", "derived from the rendezvous",
     "Network interface at whose address a process listens, such as eth1 (docs/running.md)"},
    {"GRADWIRE_VERIFY_PAYLOAD", "0",
     "1: a checksum after each message that this rank sends over TCP (docs/faults.md)"},
    {"GRADWIRE_TUNING", "cuBLASLt's choices",
     "File with algorithms of products on CUDA: missing algorithms are timed at first use, and added "
     "(docs/gpu.md). Runs with different files differ in their last bits"},
    {"GRADWIRE_EARLY_LAUNCH", "0",
     "1: on an H100 and newer GPUs, kernels start while the kernels before them end (docs/gpu.md)"},
    {"GRADWIRE_NCCL_LIBRARY", "libnccl.so.2",
     "The NCCL library to load, where the default name is not found"},
    {"GRADWIRE_PYTHON", "/usr/bin/python3, or else the first python3 on PATH",
     "The Python of gradwire report, which needs plotly, and of gradwire export, whose --tensorboard needs "
     "tensorboard"},
    {"PYTHONPATH", "none",
     "Folders in which these programs find modules that Python has nowhere else. Python's other variables "
     "have no effect on them"},
    {"COLUMNS", "the terminal's width, or 100", "Columns of --help, from 40 to 110"},
    {"GRADWIRE_BENCH_FLUSH_BYTES", "twice the last-level cache",
     "gradwire-bench: bytes written before timing with cold caches, and the size of large copies. Smaller "
     "values are faster, but leave caches warm"},
};

constexpr EnvironmentVariable kInterposer[] = {
    {"GRADWIRE_NCCL_SPEC", "bf16",
     "Format that ncclAllReduce sends: a wire format of docs/formats.md, with options; off: the interposer "
     "has no effect"},
    {"GRADWIRE_NCCL_MIN_BYTES", "1M", "Smaller calls are not compressed; K, M and G are powers of 1024"},
    {"GRADWIRE_NCCL_MAX_STATE_BYTES", "4G",
     "Device memory for residuals per communicator; further buffers have no error feedback"},
    {"GRADWIRE_NCCL_RANKS_PER_NODE", "unknown",
     "For schedule=hierarchical: rank = node x ranks per node + local index"},
    {"GRADWIRE_NCCL_DRY_RUN", "off", "1: change nothing, log the decisions"},
};

constexpr EnvironmentVariable kLaunchers[] = {
    {"RANK WORLD_SIZE", "none", "torchrun, or set by hand: rank of this process, and number of ranks"},
    {"LOCAL_RANK LOCAL_WORLD_SIZE", "none",
     "The same on this machine: selects the GPU of a rank and its share of the cores"},
    {"MASTER_ADDR", "from the launcher", "Machine of rank 0, with the rendezvous store"},
    {"MASTER_PORT", "29500", "A free port on that machine"},
    {"TORCHELASTIC_RUN_ID", "none", "torchrun: identifies the run; not set where ranks are started by hand"},
    {"TORCHELASTIC_USE_AGENT_STORE", "off",
     "torchrun: the agent uses MASTER_PORT, so the rendezvous uses the port 100 higher"},
    {"OMPI_COMM_WORLD_RANK OMPI_COMM_WORLD_SIZE OMPI_COMM_WORLD_LOCAL_RANK OMPI_COMM_WORLD_LOCAL_SIZE",
     "none", "Open MPI: rank and number of ranks, and both on this machine"},
    {"OMPI_MCA_ess_base_jobid PMIX_NAMESPACE", "none",
     "Open MPI: the job; determines the port and identifies the run"},
    {"PMIX_RANK PALS_RANKID MPT_MPI_RANK ALPS_APP_PE", "none",
     "PRRTE, PALS, MPT, ALPS: rank. An error above 0 where no variable contains the number of ranks"},
    {"PMI_RANK PMI_SIZE MPI_LOCALRANKID MPI_LOCALNRANKS", "none",
     "MPICH, Intel MPI: rank and number of ranks, and both on this machine"},
    {"PMI_JOBID PMI_PORT", "none",
     "MPICH: the job; the first variable that is set determines the port and identifies the run"},
    {"MV2_COMM_WORLD_RANK MV2_COMM_WORLD_SIZE MV2_COMM_WORLD_LOCAL_RANK MV2_COMM_WORLD_LOCAL_SIZE", "none",
     "MVAPICH: rank and number of ranks, and both on this machine"},
    {"JSM_NAMESPACE_RANK JSM_NAMESPACE_SIZE JSM_NAMESPACE_LOCAL_RANK JSM_NAMESPACE_LOCAL_SIZE", "none",
     "jsrun: rank and number of ranks, and both on this machine"},
    {"FLUX_TASK_RANK FLUX_JOB_SIZE FLUX_TASK_LOCAL_ID", "none",
     "Flux: rank and number of ranks, and rank on this machine"},
    {"SLURM_PROCID SLURM_STEP_NUM_TASKS SLURM_LOCALID", "none",
     "Slurm: rank and number of ranks of the step, and rank on this machine"},
    {"SLURM_NODEID SLURM_STEP_TASKS_PER_NODE SLURM_STEP_NUM_NODES", "none",
     "Slurm: index of this machine in the step, ranks on each machine, and number of machines of the step or "
     "of its part of a heterogeneous job"},
    {"SLURM_CPUS_ON_NODE", "none", "Slurm: a rank with fewer cores than this counts as bound to its cores"},
    {"SLURM_STEP_NODELIST SLURM_JOB_NODELIST SLURM_JOB_NODELIST_HET_GROUP_0", "none",
     "Slurm: the rendezvous is at the first node of the step; of the job, without a step and for mpirun; of "
     "part 0 of a heterogeneous job"},
    {"SLURM_JOB_ID SLURM_HET_JOB_ID SLURM_STEP_ID", "none",
     "Slurm: the job, the job that all parts of a heterogeneous job share, and the step; determine the port "
     "and identify the run"},
    {"SLURM_HET_SIZE", "none", "Slurm: number of parts of a heterogeneous job"},
};

constexpr EnvironmentVariable kNccl[] = {
    {"NCCL_COMM_ID", "none", "host:port of the rendezvous nccl://"},
};

constexpr EnvironmentGroup kGroups[] = {{"Libraries and commands", kOwn},
                                        {"The NCCL interposer", kInterposer},
                                        {"Set by launchers", kLaunchers},
                                        {"NCCL's own", kNccl}};

}  // namespace

std::string environment_text() {
  std::string text;
  for (const EnvironmentGroup& group : kGroups) {
    text += (text.empty() ? "## " : "\n## ") + std::string(group.title) + "\n\n";
    text += "| variable | when not set | meaning |\n|---|---|---|\n";
    for (const EnvironmentVariable& v : group.variables) {
      std::string names(v.names);
      for (size_t i = 0; (i = names.find(' ', i)) != names.npos; i += 4) names.replace(i, 1, "`, `");
      text += fmt::format("| `{}` | {} | {} |\n", names, v.otherwise, v.meaning);
    }
  }
  return text;
}

const char* environment(const char* name) {
  const std::string word = fmt::format(" {} ", name);
  for (const EnvironmentGroup& group : kGroups) {
    for (const EnvironmentVariable& v : group.variables) {
      if (fmt::format(" {} ", v.names).find(word) == std::string::npos) continue;
      const char* value = std::getenv(name);
      if (value != nullptr && !v.any_line_end && std::strchr(value, '\r') != nullptr) {
        throw BadInput(std::string(name) +
                       " contains a carriage return, as from a file with Windows line ends; "
                       "set it without");
      }
      return value == nullptr || *value == '\0' ? nullptr : value;
    }
  }
  throw Error(std::string(name) + " is not in the table of runtime/util/environment.cpp");
}

const char* path_in_environment(const char* name) {
  const char* path = environment(name);
  if (path == nullptr || path_problem(path).empty()) return path;
  throw BadInput(std::string(name) + ": " + path_problem(path));
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
