#include "trainer/cli/launcher.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <chrono>
#include <string_view>

#include "collectives/communicator/communicator.h"
#include "collectives/transport/nccl.h"
#include "collectives/transport/tcp.h"
#include "runtime/environment.h"
#include "runtime/error.h"
#include "runtime/thread_pool.h"
#include "trainer/config/members.h"

namespace gradwire {
namespace {

using Lookup = std::function<const char*(const char*)>;

struct Variables {
  const char* launcher;
  const char *rank, *world, *local_rank, *local_world;
};

// In order of precedence. torchrun may run under Slurm. So may mpirun: it starts its daemons with srun, and
// the ranks inherit the daemons' SLURM_PROCID. A batch script and salloc's shell have SLURM_NTASKS although
// nothing was launched; only a step (srun) has SLURM_STEP_NUM_TASKS.
constexpr Variables kLaunchers[] = {
    {"torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"},
    {"mpirun (Open MPI)", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
     "OMPI_COMM_WORLD_LOCAL_SIZE"},
    {"mpirun (MPICH)", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"},
    {"Slurm", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", ""},
};

constexpr int kDefaultPort = 29500;

int parse(const std::string& variable, std::string_view text) {
  int value = 0;
  auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || value < 0) {
    throw BadInput(
        fmt::format("{}='{}' in the environment is not a non-negative integer; unset it", variable, text));
  }
  return value;
}

std::string value_of(const Lookup& lookup, const char* variable) {
  const char* value = *variable == '\0' ? nullptr : lookup(variable);
  return value == nullptr ? "" : value;
}

// The first of several variables that is set.
std::string first_of(const Lookup& lookup, std::initializer_list<const char*> variables) {
  for (const char* variable : variables) {
    if (std::string value = value_of(lookup, variable); !value.empty()) return value;
  }
  return "";
}

// Below the system's ephemeral ports, and different for jobs that share a machine.
int port_of_job(const std::string& job) {
  uint32_t hash = 2166136261u;
  for (char c : job) hash = (hash ^ static_cast<uint8_t>(c)) * 16777619u;
  return 20'000 + static_cast<int>(hash % 10'000);
}

std::string tcp(const std::string& host, int port) {
  bool v6 = host.find(':') != std::string::npos;
  return fmt::format("tcp://{}:{}", v6 ? "[" + host + "]" : host, port);
}

std::string find_rendezvous(const Launch& launch, const Lookup& lookup) {
  const std::string host = value_of(lookup, "MASTER_ADDR"), port_text = value_of(lookup, "MASTER_PORT");
  int port = port_text.empty() ? 0 : parse("MASTER_PORT", port_text);
  if (!port_text.empty() && (port < 1 || port > 65535)) {
    throw BadInput(
        fmt::format("MASTER_PORT={} in the environment is not a port; set it to 1 .. 65535", port_text));
  }
  const std::string agent = value_of(lookup, "TORCHELASTIC_USE_AGENT_STORE");
  if (!host.empty() && port > 0 && (agent == "True" || agent == "1")) {
    port += port + kPortsBeyond <= 65535 ? kPortsBeyond : -kPortsBeyond;
  }
  // Ranks that are all on this machine need no port that others can reach, nor a secret.
  const bool all_here = launch.local_world == launch.world;
  const char* loopback = "127.0.0.1";
  if (!host.empty()) return tcp(all_here ? loopback : host, port > 0 ? port : kDefaultPort);
  // Slurm says where rank 0 is; otherwise it is known only if all ranks are on this machine.
  if (auto list = first_of(lookup, {"SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"}); !list.empty()) {
    const std::string job =
        fmt::format("{}.{}", value_of(lookup, "SLURM_JOB_ID"), value_of(lookup, "SLURM_STEP_ID"));
    const std::string first = first_host(list);
    return tcp(first == list ? loopback : first, port > 0 ? port : port_of_job(job));
  }
  if (!all_here) return "";
  std::string job = first_of(lookup, {"PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "PMI_JOBID", "PMI_PORT"});
  return tcp(loopback, port > 0 ? port : port_of_job(job));
}

Launch read(const Variables& v, const Lookup& lookup) {
  Launch launch;
  launch.launcher = v.launcher;
  const std::string rank = value_of(lookup, v.rank), world = value_of(lookup, v.world);
  launch.variables = fmt::format("{}={}", v.world, world);
  launch.world = parse(v.world, world);
  if (rank.empty() && launch.world > 1) {
    throw BadInput(fmt::format("{} is set in the environment, but no {}; set it to this process's rank",
                               launch.variables, v.rank));
  }
  if (!rank.empty()) {
    launch.rank = parse(v.rank, rank);
    launch.variables = fmt::format("{}={} {}", v.rank, rank, launch.variables);
  }
  if (launch.launcher == "torchrun" && value_of(lookup, "TORCHELASTIC_RUN_ID").empty()) {
    launch.launcher = "the environment";
  }
  if (launch.world < 1 || launch.rank >= launch.world) {
    throw BadInput(fmt::format("the environment is inconsistent: {} ({}); ranks are 0 .. world - 1",
                               launch.variables, launch.launcher));
  }
  if (launch.world > kMostRanks) {
    throw BadInput(fmt::format("{} ({}): at most {} ranks", launch.variables, launch.launcher, kMostRanks));
  }
  if (auto text = value_of(lookup, v.local_rank); !text.empty())
    launch.local_rank = parse(v.local_rank, text);
  if (auto text = value_of(lookup, v.local_world); !text.empty()) {
    launch.local_world = parse(v.local_world, text);
  }
  if (launch.world > 1) launch.rendezvous = find_rendezvous(launch, lookup);
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

std::optional<Launch> detect_launcher(const Lookup& lookup) {
  std::optional<Launch> found;
  for (const Variables& v : kLaunchers) {
    if (value_of(lookup, v.world).empty()) continue;
    Launch launch = read(v, lookup);
    if (found && found->world == 1 && launch.world > 1) {
      throw BadInput(
          fmt::format("each process would train alone: {} ({}) says that there is one process, but {} "
                      "started {} ({}); {}",
                      found->variables, found->launcher, launch.launcher, launch.world, launch.variables,
                      found->launcher == "torchrun" ? "give torchrun all nodes (--nnodes)"
                                                    : "unset the variables that are wrong"));
    }
    if (!found) found = launch;
  }
  return found;
}

std::optional<Launch> detect_launcher() {
  return detect_launcher(environment);
}

std::unique_ptr<Communicator> join(const Launch& launch, const std::string& rendezvous, double timeout_s,
                                   Device device, bool insecure, bool verify_payload, bool shrinkable) {
  TcpOptions options;
  options.verify_payload = verify_payload;
  options.shrinkable = shrinkable;
  options.group.rendezvous = rendezvous.empty() ? launch.rendezvous : rendezvous;
  options.group.rank = launch.rank;
  options.group.world = launch.world;
  options.group.insecure = insecure;
  options.group.timeout = std::chrono::milliseconds(static_cast<int64_t>(timeout_s * 1e3));
  if (options.group.rendezvous.empty()) {
    throw BadInput(
        fmt::format("started by {} as one of {} processes ({}), but nothing says where they meet; set "
                    "MASTER_ADDR and MASTER_PORT to rank 0's machine and a free port there, or give "
                    "--rendezvous tcp://HOST:PORT or file:///PATH",
                    launch.launcher, launch.world, launch.variables));
  }
  if (device.is_cuda()) return Communicator::create_nccl({.group = options.group, .device = device.index});
  return Communicator::create_tcp(options);
}

Launch launch_of_newcomer(const std::string& path) {
  const int launched = read_members(path).launched;
  return {.launcher = "--join", .variables = path, .rank = launched, .world = launched, .rendezvous = ""};
}

std::unique_ptr<Communicator> join_members(const std::string& path, const std::string& about,
                                           double timeout_s, bool verify_payload) {
  TcpOptions options;
  options.verify_payload = verify_payload;
  options.group.timeout = std::chrono::milliseconds(static_cast<int64_t>(timeout_s * 1e3));
  return Communicator::join_tcp(options,
                                {.read =
                                     [path] {
                                       try {
                                         return read_members(path).doors;
                                       } catch (const BadInput&) {  // the run has ended, or is about to begin
                                         return std::string();
                                       }
                                     },
                                 .about = about});
}

void share_cores(const Launch& launch) {
  if (launch.local_world < 2 || environment("GRADWIRE_THREADS") != nullptr) return;
  const int usable = host_threads();
  // torchrun does not bind processes to cores: if this process has fewer, all of them share those.
  const bool bound = usable < sysconf(_SC_NPROCESSORS_ONLN) && launch.launcher.starts_with("mpirun");
  if (!bound) set_host_threads(std::max(1, usable / launch.local_world));
}

}  // namespace gradwire
