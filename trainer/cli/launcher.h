// Detects the launcher that started this process, and the rendezvous of its ranks. torchrun, Slurm and mpirun
// set environment variables. Without a launcher, set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "collectives/transport/tcp/tcp.h"
#include "runtime/device/device.h"
#include "runtime/util/environment.h"
#include "trainer/config/settings.h"

namespace gradwire {

class Communicator;

// torchrun's agent may have a store on MASTER_PORT (TORCHELASTIC_USE_AGENT_STORE). Gradwire's store is then
// on MASTER_PORT + kPortsBeyond, or on MASTER_PORT - kPortsBeyond if the sum is above 65535.
constexpr int kPortsBeyond = 100;

// Detects the launcher from the variables that `lookup` returns (null: not set). Throws BadInput when a
// launcher's variables contradict each other, when one launcher reports one process and another reports
// several, and when a rank is above 0 and the number of ranks is unknown.
std::optional<Launch> detect_launcher(const std::function<const char*(const char*)>& lookup = environment);

// Returns the rendezvous of the ranks: `rendezvous` unless empty, otherwise the launcher's. Throws BadInput
// if neither is known.
std::string rendezvous_for(const Launch& launch, const std::string& rendezvous);

// Returns the options for ranks that are processes. `rendezvous`: if empty, the launcher's rendezvous.
TcpOptions tcp_options(const std::string& rendezvous, double timeout_s, const EmulatedLink& link = {});

// Connects to the other processes, with NCCL when `device` is a GPU. Throws BadInput when no rendezvous is
// known, when other machines can reach the rendezvous and the run has no secret, or when this build lacks
// NCCL.
std::unique_ptr<Communicator> join(const Launch& launch, TcpOptions options, Device device);

// Connects to the other processes of the run. Returns null if this process is the only process.
std::unique_ptr<Communicator> join(const RunOptions& options, const TrainConfig& config);

// Returns the Launch of a process that joins the run whose --members is `path`. Until admission, its rank is
// the run's world size at launch. Throws BadInput if the file cannot be read.
Launch launch_of_joiner(const std::string& path);
// Sends `about` to the run of --join, and blocks until the run admits this process: see
// join_tcp_transport().
std::unique_ptr<Communicator> join_members(const RunOptions& options, const std::string& about);

// Divides the machine's cores among its processes, unless the launcher has bound each process to separate
// cores or GRADWIRE_THREADS is set.
void share_cores(const Launch& launch);
// Returns the number of threads that share_cores() sets. `cpus`: processors on which this process may run.
// `of`: processors of the machine, or of the job on this machine. `quota`: quota of processor time in
// processors, for all processes of the machine together; 0 for no quota.
int threads_of_share(const Launch& launch, int cpus, int of, int quota);

// Returns the first name in a Slurm host list: "gpu[03-05,9],login1" -> "gpu03".
std::string first_host(const std::string& slurm_list);
// Returns the entry of node `index` in a Slurm list of counts: "2(x3),1" has the entries 2 2 2 1. Returns 0
// if the list has no such entry or is invalid.
int count_of_node(const std::string& slurm_counts, int index);

}  // namespace gradwire
