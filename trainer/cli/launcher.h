// Detects the launcher that started this process, and the rendezvous of its ranks. torchrun, Slurm and mpirun
// set environment variables. Without a launcher, set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "collectives/net/socket.h"
#include "runtime/device/device.h"

namespace gradwire {

class Communicator;

struct Launch {
  std::string launcher;   // "torchrun", "Slurm", "mpirun (Open MPI)", ...
  std::string variables;  // "RANK=1 WORLD_SIZE=4"
  int rank = 0, world = 1;
  // Among the ranks on this machine. -1 and 0 if the launcher does not set them.
  int local_rank = -1, local_world = 0;
  // tcp://host:port, the same on every rank. Empty if unknown, and in a world of 1.
  std::string rendezvous;
  // The reason for an empty rendezvous: an invalid variable. An error only if the ranks need it.
  std::string no_rendezvous = {};
  // Set if rank 0's node is assumed: the variable with the list of nodes, whose first node is assumed to be
  // rank 0's.
  std::string assumed_from = {};
};

// torchrun's agent may have a store on MASTER_PORT (TORCHELASTIC_USE_AGENT_STORE). Gradwire's store is then
// on MASTER_PORT + kPortsBeyond, or on MASTER_PORT - kPortsBeyond if the sum is above 65535.
constexpr int kPortsBeyond = 100;

// Detects the launcher from the variables that `lookup` returns (null: not set). Throws BadInput when a
// launcher's variables contradict each other, or when one launcher reports one process and another reports
// several.
std::optional<Launch> detect_launcher(const std::function<const char*(const char*)>& lookup);
// Detects the launcher of this process from its environment.
std::optional<Launch> detect_launcher();

// Returns the rendezvous of the ranks: `rendezvous` unless empty, otherwise the launcher's. Throws BadInput
// if neither is known.
std::string rendezvous_for(const Launch& launch, const std::string& rendezvous);

// How a process connects to the others, from its flags. The fields are those of GroupOptions and TcpOptions.
struct JoinOptions {
  std::string rendezvous;  // empty: the launcher's
  double timeout_s = 60;
  bool shrinkable = false;
};

// Connects to the other processes, with NCCL when `device` is a GPU. Throws BadInput when no rendezvous is
// known, when other machines can reach it and the run has no secret, or when this build lacks NCCL.
std::unique_ptr<Communicator> join(const Launch& launch, const JoinOptions& how,
                                   Device device = Device::host());

// Returns the Launch of a process that joins the run whose --members is `path`. Until admission, its rank is
// the run's world size at launch. Throws BadInput if the file cannot be read.
Launch launch_of_joiner(const std::string& path);
// Sends the run `about`, and blocks until the run admits this process: see Communicator::join_tcp().
std::unique_ptr<Communicator> join_members(const std::string& path, const std::string& about,
                                           const JoinOptions& how);

// Divides the machine's cores among its processes, unless the launcher has bound each process to separate
// cores or GRADWIRE_THREADS is set.
void share_cores(const Launch& launch);
// Returns the resulting number of threads. `cpus`: processors on which this process may run. `of`: processors
// of the machine (or of the job on it). `quota`: quota of processor time, in processors, for all processes of
// the machine together; 0: none.
int threads_of_share(const Launch& launch, int cpus, int of, int quota);

// Returns the first name in a Slurm host list: "gpu[03-05,9],login1" -> "gpu03".
std::string first_host(const std::string& slurm_list);
// Returns the entry of node `index` in a Slurm list of counts: "2(x3),1" -> 2 2 2 1. Returns 0 if the list
// has no such entry or is invalid.
int count_of_node(const std::string& slurm_counts, int index);

}  // namespace gradwire
