// Which launcher, if any, started this process, and where its ranks meet. torchrun, Slurm and mpirun say so
// in environment variables; without a launcher, set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "collectives/rendezvous/socket.h"
#include "runtime/device.h"

namespace gradwire {

class Communicator;

struct Launch {
  std::string launcher;   // "torchrun", "Slurm", "mpirun (Open MPI)", ...
  std::string variables;  // "RANK=1 WORLD_SIZE=4"
  int rank = 0, world = 1;
  // Among the ranks on this machine; -1 and 0 if the launcher does not say.
  int local_rank = -1, local_world = 0;
  // tcp://host:port, the same on every rank; empty if unknown, and in a world of 1.
  std::string rendezvous;
  // The reason why it is empty, if a variable is wrong: an error only if the ranks need this rendezvous.
  std::string no_rendezvous = {};
  // Set if rank 0 is only assumed to run there: the variable with the list of nodes, whose first node it is.
  std::string assumed_from = {};
};

// torchrun's agent may have its own store on MASTER_PORT (TORCHELASTIC_USE_AGENT_STORE). Ours is then on
// MASTER_PORT + kPortsBeyond, or MASTER_PORT - kPortsBeyond if the sum is above 65535.
constexpr int kPortsBeyond = 100;

// Looks up variables with `lookup` (null: not set). Throws BadInput when a launcher's variables contradict
// each other, or when one launcher says that there is one process and another started several.
std::optional<Launch> detect_launcher(const std::function<const char*(const char*)>& lookup);
// The same for this process.
std::optional<Launch> detect_launcher();

// Returns the rendezvous of the ranks: `rendezvous` unless empty, else the launcher's. Throws BadInput if
// there is none.
std::string meeting_place(const Launch& launch, const std::string& rendezvous);

// How a process joins others, as its flags say; the fields are those of GroupOptions and TcpOptions.
struct JoinOptions {
  std::string rendezvous;  // empty: the launcher's
  double timeout_s = 60;
  bool insecure = false, verify_payload = false, shrinkable = false;
  std::string interface = {};
  PortRange ports = {};
};

// Joins the other processes, with NCCL when `device` is a GPU. Throws BadInput when no rendezvous is known, when
// other machines can reach it and the run has no secret (unless `insecure`), or when this build has no NCCL.
std::unique_ptr<Communicator> join(const Launch& launch, const JoinOptions& how,
                                   Device device = Device::host());

// A process that joins a run whose --members is `path`. Until it is let in, its rank is the first that none of those has
// with which the run was launched. Throws BadInput if the file cannot be read.
Launch launch_of_newcomer(const std::string& path);
// Blocks until the run's ranks let this process in, to which it says `about` itself: see Communicator::join_tcp().
std::unique_ptr<Communicator> join_members(const std::string& path, const std::string& about,
                                           const JoinOptions& how);

// Divides the machine's cores between its processes, unless the launcher has bound each process to its own
// cores or GRADWIRE_THREADS is set.
void share_cores(const Launch& launch);
// Returns the resulting number of threads. `cpus`: the processors that this process may run on; `of`: the
// processors of the machine (or of the job there); `quota`: the quota of processor time, in processors, for
// all processes of the machine together, 0: none.
int threads_of_share(const Launch& launch, int cpus, int of, int quota);

// The first name in a Slurm host list: "gpu[03-05,9],login1" -> "gpu03".
std::string first_host(const std::string& slurm_list);
// Returns the entry of node `index` in a Slurm list of counts: "2(x3),1" -> 2 2 2 1. 0 if the list has no
// such entry or is invalid.
int count_of_node(const std::string& slurm_counts, int index);

}  // namespace gradwire
