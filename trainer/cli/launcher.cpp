#include "trainer/cli/launcher.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <sstream>
#include <string_view>

#include "collectives/communicator/communicator.h"
#include "collectives/net/reach.h"
#include "collectives/transport/nccl/nccl.h"
#include "runtime/threads/thread.h"
#include "runtime/threads/thread_pool.h"
#include "runtime/util/environment.h"
#include "runtime/util/error.h"
#include "runtime/util/parse.h"
#include "trainer/config/config.h"

namespace gradwire {
namespace {

using Lookup = std::function<const char*(const char*)>;

enum class LauncherKind { by_hand, mpirun, mpich, slurm };

struct Variables {
  LauncherKind kind;
  const char* launcher;
  const char *rank, *world, *local_rank, *local_world;
};

// The launchers in order of precedence. All others may run under Slurm. mpirun starts its daemons with srun,
// and the ranks inherit the daemons' SLURM_PROCID. A batch script and salloc's shell have SLURM_NTASKS even
// if nothing was launched; only a step (srun) has SLURM_STEP_NUM_TASKS. MVAPICH under Hydra, Flux and PALS
// also set PMI_RANK and PMI_SIZE. The launchers of the last rows do not provide a number of ranks.
constexpr Variables kLaunchers[] = {
    {LauncherKind::by_hand, "torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"},
    {LauncherKind::mpirun, "mpirun (Open MPI)", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE",
     "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"},
    {LauncherKind::mpich, "mpirun (MPICH)", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"},
    {LauncherKind::mpirun, "mpirun (MVAPICH)", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE",
     "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE"},
    {LauncherKind::mpirun, "jsrun", "JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_LOCAL_RANK",
     "JSM_NAMESPACE_LOCAL_SIZE"},
    {LauncherKind::mpirun, "Flux", "FLUX_TASK_RANK", "FLUX_JOB_SIZE", "FLUX_TASK_LOCAL_ID", ""},
    {LauncherKind::slurm, "Slurm", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID",
     "SLURM_STEP_TASKS_PER_NODE"},
    {LauncherKind::mpirun, "prun", "PMIX_RANK", "", "", ""},
    {LauncherKind::mpirun, "PALS", "PALS_RANKID", "", "", ""},
    {LauncherKind::mpirun, "MPT", "MPT_MPI_RANK", "", "", ""},
    {LauncherKind::mpirun, "ALPS", "ALPS_APP_PE", "", "", ""},
};

constexpr int kDefaultPort = 29500;

int parse(const std::string& variable, std::string_view text) {
  if (const auto value = parse_number(text, 0)) return *value;
  throw BadInput("{}='{}' in the environment is not a non-negative integer; unset it", variable, text);
}

std::string value_of(const Lookup& lookup, const char* variable) {
  const char* value = *variable == '\0' ? nullptr : lookup(variable);
  return value == nullptr ? "" : value;
}

// Returns the value of the first variable that is set.
std::string first_of(const Lookup& lookup, std::initializer_list<const char*> variables) {
  for (const char* variable : variables) {
    if (std::string value = value_of(lookup, variable); !value.empty()) return value;
  }
  return "";
}

std::string tcp(std::string host, int port) {
  if (host.starts_with("[") && host.ends_with("]")) host = host.substr(1, host.size() - 2);
  bool v6 = host.find(':') != std::string::npos;
  return fmt::format("tcp://{}:{}", v6 ? "[" + host + "]" : host, port);
}

// Returns MASTER_PORT, or 0 if the variable is not set.
int master_port(const Lookup& lookup) {
  const std::string text = value_of(lookup, "MASTER_PORT");
  if (text.find("://") != std::string::npos) {
    throw BadInput(
        "MASTER_PORT={} in the environment is not a port; Kubernetes sets the variable for a service named "
        "'master'. Set MASTER_PORT to a free port on rank 0's machine, or give the pod enableServiceLinks: "
        "false",
        text);
  }
  const int port = text.empty() ? 0 : parse("MASTER_PORT", text);
  if (!text.empty() && (port < 1 || port > 65535)) {
    throw BadInput("MASTER_PORT={} in the environment is not a port; set it to 1 .. 65535", text);
  }
  return port;
}

// Returns whether mpirun started the ranks. mpirun starts a daemon as a Slurm step on each node except the
// first node, and its ranks inherit the variables of these steps. So only the Slurm variables of the job are
// common to the ranks.
bool by_mpirun(LauncherKind kind) {
  return kind == LauncherKind::mpirun || kind == LauncherKind::mpich;
}

// Returns MASTER_PORT or, if the variable is not set, a port below the system's ephemeral ports that is equal
// in all processes of this launch and different in other launches on the same machines. Ignores Kubernetes'
// variable of that name, because the ranks can connect without a port from the environment.
int port_of_launch(LauncherKind kind, bool all_here, const Lookup& lookup) {
  if (value_of(lookup, "MASTER_PORT").find("://") == std::string::npos) {
    if (const int port = master_port(lookup); port > 0) return port;
  }
  const std::string step = by_mpirun(kind) ? first_of(lookup, {"PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid",
                                                               "PMI_JOBID", all_here ? "PMI_PORT" : ""})
                                           : value_of(lookup, "SLURM_STEP_ID");
  uint32_t hash = 2166136261u;
  for (char c : fmt::format("{}.{}", first_of(lookup, {"SLURM_HET_JOB_ID", "SLURM_JOB_ID"}), step))
    hash = (hash ^ static_cast<uint8_t>(c)) * 16777619u;
  return 20'000 + static_cast<int>(hash % 10'000);
}

// Sets the rendezvous to the first node of the Slurm step, or of mpirun's allocation, where rank 0 is assumed
// to run.
void assume_first_node(LauncherKind kind, const Lookup& lookup, Launch& launch) {
  for (const char* name : {"SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"}) {
    std::string list = value_of(lookup, name);
    if (list.empty() || (by_mpirun(kind) && std::string_view(name) == "SLURM_STEP_NODELIST")) continue;
    launch.assumed_from = name;
    // If a step spans several parts of a heterogeneous job, its nodes have consecutive numbers, but each part
    // lists only the nodes of the part.
    const std::string node = value_of(lookup, "SLURM_NODEID"),
                      nodes = value_of(lookup, "SLURM_STEP_NUM_NODES");
    if (kind == LauncherKind::slurm && !node.empty() && !nodes.empty() &&
        parse("SLURM_NODEID", node) >= parse("SLURM_STEP_NUM_NODES", nodes)) {
      launch.assumed_from = "SLURM_JOB_NODELIST_HET_GROUP_0";
      list = value_of(lookup, "SLURM_JOB_NODELIST_HET_GROUP_0");
      if (list.empty()) return;
    }
    const std::string first = first_host(list);
    const int port = port_of_launch(kind, false, lookup);
    const bool one_node = first == list && launch.assumed_from == name;
    launch.rendezvous = tcp(one_node ? loopback_address() : first, port);
    return;
  }
}

void find_rendezvous(LauncherKind kind, const Lookup& lookup, Launch& launch) {
  // If all ranks are on this machine, they need neither a port that other machines can reach nor a secret.
  const bool all_here = launch.local_world == launch.world;
  if (const std::string host = value_of(lookup, "MASTER_ADDR"); !host.empty()) {
    int port = master_port(lookup);
    const std::string agent = value_of(lookup, "TORCHELASTIC_USE_AGENT_STORE");
    if (port > 0 && (agent == "True" || agent == "1")) {
      port += port + kPortsBeyond <= 65535 ? kPortsBeyond : -kPortsBeyond;
    }
    launch.rendezvous = tcp(all_here ? loopback_address() : host, port > 0 ? port : kDefaultPort);
  } else if (all_here) {
    launch.rendezvous = tcp(loopback_address(), port_of_launch(kind, true, lookup));
  } else {
    assume_first_node(kind, lookup, launch);
  }
}

// Returns whether srun set the variables: srun --mpi=pmi2 sets PMI_RANK and PMI_SIZE, as Hydra does.
bool is_srun(const Variables& v, const Lookup& lookup) {
  return v.kind == LauncherKind::mpich && value_of(lookup, v.local_world).empty() &&
         value_of(lookup, "SLURM_STEP_NUM_TASKS") == value_of(lookup, v.world) &&
         value_of(lookup, "SLURM_PROCID") == value_of(lookup, v.rank);
}

Launch read(const Variables& v, const Lookup& lookup) {
  Launch launch;
  launch.launcher = v.launcher;
  const std::string rank = value_of(lookup, v.rank), world = value_of(lookup, v.world);
  launch.variables = fmt::format("{}={}", v.world, world);
  launch.world = parse(v.world, world);
  if (rank.empty() && launch.world > 1) {
    throw BadInput("{} is set in the environment, but not {}; set {} to this process's rank",
                   launch.variables, v.rank, v.rank);
  }
  if (!rank.empty()) {
    launch.rank = parse(v.rank, rank);
    launch.variables = fmt::format("{}={} {}", v.rank, rank, launch.variables);
  }
  if (launch.launcher == "torchrun" && value_of(lookup, "TORCHELASTIC_RUN_ID").empty()) {
    launch.launcher = "the environment";
  }
  if (launch.world < 1 || launch.rank >= launch.world) {
    const bool parts = v.kind == LauncherKind::slurm && !value_of(lookup, "SLURM_HET_SIZE").empty();
    throw BadInput("the environment is inconsistent: {} ({}); ranks are 0 .. world - 1{}", launch.variables,
                   launch.launcher,
                   parts ? ". Slurm counts the tasks of each part of a heterogeneous job: set RANK to "
                           "SLURM_PROCID, WORLD_SIZE to the number of all, and MASTER_ADDR to rank 0's node"
                         : "");
  }
  if (launch.world > kMaxRanks) {
    throw BadInput("{} ({}): at most {} ranks", launch.variables, launch.launcher, kMaxRanks);
  }
  const std::string local_rank = value_of(lookup, v.local_rank),
                    local_world = value_of(lookup, v.local_world);
  if (!local_rank.empty()) launch.local_rank = parse(v.local_rank, local_rank);
  if (!local_world.empty() && v.kind != LauncherKind::slurm)
    launch.local_world = parse(v.local_world, local_world);
  if (!local_world.empty() && v.kind == LauncherKind::slurm) {  // the tasks of each node of the step
    const std::string node = value_of(lookup, "SLURM_NODEID");
    launch.local_world = count_of_node(local_world, node.empty() ? 0 : parse("SLURM_NODEID", node));
  }
  if (launch.local_world > 0 &&
      (launch.local_rank >= launch.local_world || launch.local_world > launch.world)) {
    throw BadInput(
        "the environment is inconsistent: {}={} {}={} {} ({}); ranks on a machine are 0 .. {} - "
        "1, and at most all",
        v.local_rank, local_rank, v.local_world, local_world, launch.variables, launch.launcher,
        v.local_world);
  }
  if (launch.world > 1) {
    try {
      find_rendezvous(v.kind, lookup, launch);
    } catch (const BadInput& error) {
      launch.no_rendezvous = error.what();
    }
  }
  return launch;
}

}  // namespace

std::string first_host(const std::string& slurm_list) {
  std::string first = slurm_list.substr(0, slurm_list.find_first_of(",["));
  if (first.size() == slurm_list.size() || slurm_list[first.size()] == ',') return first;
  size_t begin = first.size() + 1, end = slurm_list.find_first_of(",-]", begin);
  size_t close = slurm_list.find(']', begin);
  if (close == std::string::npos) return first;
  size_t after = slurm_list.find(',', close);
  return first + slurm_list.substr(begin, end - begin) +
         first_host(slurm_list.substr(close + 1, after == std::string::npos ? after : after - close - 1));
}

int count_of_node(const std::string& slurm_counts, int index) {
  std::istringstream entries(slurm_counts);
  int nodes = 0, count = 0, repeated = 0;
  for (std::string entry; std::getline(entries, entry, ',');) {
    repeated = 1;
    if (std::sscanf(entry.c_str(), "%d(x%d)", &count, &repeated) < 1 || count < 0 || repeated < 1) return 0;
    nodes += repeated;
    if (index < nodes) return count;
  }
  return nodes == repeated ? count : 0;  // later part of a heterogeneous job; its nodes share one number
}

std::optional<Launch> detect_launcher(const Lookup& lookup) {
  std::optional<Launch> found;
  for (const Variables& v : kLaunchers) {
    if (value_of(lookup, v.world).empty() || is_srun(v, lookup)) continue;
    Launch launch = read(v, lookup);
    if (found && found->world == 1 && launch.world > 1) {
      throw BadInput(
          "each process would train alone: {} ({}) reports one process, but {} "
          "started {} ({}); {}",
          found->variables, found->launcher, launch.launcher, launch.world, launch.variables,
          found->launcher == "torchrun" ? "give torchrun all nodes (--nnodes)" : "unset the wrong variables");
    }
    if (!found) found = launch;
  }
  for (const Variables& v : kLaunchers) {
    const std::string rank = value_of(lookup, v.rank);
    if ((found && found->world > 1) || !value_of(lookup, v.world).empty() || !parse_number(rank, 1)) continue;
    throw BadInput(
        "each process would train alone: {}={} in the environment, but no variable has the number of ranks; "
        "set RANK to {}, WORLD_SIZE and MASTER_ADDR, or unset {}",
        v.rank, rank, rank, v.rank);
  }
  return found;
}

std::string rendezvous_for(const Launch& launch, const std::string& rendezvous) {
  if (!rendezvous.empty()) return rendezvous;
  if (!launch.no_rendezvous.empty()) throw BadInput(launch.no_rendezvous);
  if (!launch.rendezvous.empty()) return launch.rendezvous;
  throw BadInput(
      "started by {} as one of {} processes ({}), but the rendezvous is unknown; set "
      "MASTER_ADDR and MASTER_PORT to rank 0's machine and a free port there, or give "
      "--rendezvous tcp://HOST:PORT or file:///PATH",
      launch.launcher, launch.world, launch.variables);
}

TcpOptions tcp_options(const std::string& rendezvous, double timeout_s, const EmulatedLink& link) {
  TcpOptions options{.group = {}, .link = link};
  options.group.rendezvous = rendezvous;
  options.group.timeout = std::chrono::milliseconds(static_cast<int64_t>(timeout_s * 1e3));
  return options;
}

std::unique_ptr<Communicator> join(const Launch& launch, TcpOptions options, Device device) {
  const bool given = !options.group.rendezvous.empty();
  options.group.rendezvous = rendezvous_for(launch, options.group.rendezvous);
  options.group.rank = launch.rank;
  options.group.world = launch.world;
  try {
    if (device.is_cuda())
      return std::make_unique<Communicator>(
          make_nccl_transport({.group = options.group, .device = device.index}));
    return std::make_unique<Communicator>(make_tcp_transport(options));
  } catch (const CommError& error) {
    const std::string text = error.what();
    const bool not_there = text.find("cannot listen on") != std::string::npos ||
                           text.find("did not reach rank 0") != std::string::npos;
    if (given || launch.assumed_from.empty() || !not_there) throw;
    throw CommError(
        "{}; rank 0 is assumed to be on the first node of {}: if rank 0 is on another node, set "
        "MASTER_ADDR to that node on every rank",
        text, launch.assumed_from);
  }
}

std::unique_ptr<Communicator> join(const RunOptions& o, const TrainConfig& config) {
  if (!o.launch || o.launch->world == 1) return nullptr;
  Device device = config.devices[static_cast<size_t>(o.launch->rank)];
  if (device.is_cuda() && o.launch->local_rank >= 0) {
    device = Device::cuda(o.launch->local_rank % cuda_device_count());
  }
  TcpOptions options = tcp_options(o.rendezvous, o.timeout_s, config.link);
  options.shrinkable = static_cast<bool>(config.elastic);
  return join(*o.launch, options, device);
}

Launch launch_of_joiner(const std::string& path) {
  const int launched = read_members(path).launched;
  return {.launcher = "--join", .variables = path, .rank = launched, .world = launched, .rendezvous = ""};
}

std::unique_ptr<Communicator> join_members(const RunOptions& options, const std::string& about) {
  const auto link = options.link_text ? EmulatedLink::parse(*options.link_text) : EmulatedLink{};
  return std::make_unique<Communicator>(
      join_tcp_transport(tcp_options(options.rendezvous, options.timeout_s, link),
                         {.invitation =
                              [path = options.join] {
                                try {
                                  return read_members(path).invitation;
                                } catch (const BadInput&) {  // the run has ended or has not begun yet
                                  return std::string();
                                }
                              },
                          .about = about}));
}

int threads_of_share(const Launch& launch, int cpus, int of, int quota) {
  const int processes = std::max(1, launch.local_world);
  // torchrun does not bind processes to cores: if this process has fewer cores than the machine, all
  // processes share these cores.
  const bool binds = launch.launcher != "torchrun" && launch.launcher != "the environment";
  int threads = binds && cpus < of ? std::min(cpus, std::max(1, of / processes)) : cpus / processes;
  if (quota > 0) threads = std::min(threads, quota / processes);
  return std::max(1, threads);
}

void share_cores(const Launch& launch) {
  if (launch.local_world < 2 || environment("GRADWIRE_THREADS") != nullptr) return;
  // Under Slurm, use the job's cores on this machine. The machine may have more cores.
  const char* of_job = launch.launcher == "Slurm" ? environment("SLURM_CPUS_ON_NODE") : nullptr;
  const int of = of_job != nullptr ? parse("SLURM_CPUS_ON_NODE", of_job)
                                   : static_cast<int>(sysconf(_SC_NPROCESSORS_ONLN));
  set_host_threads(threads_of_share(launch, cpus_by_affinity(), of, cpus_by_quota()));
}

}  // namespace gradwire
