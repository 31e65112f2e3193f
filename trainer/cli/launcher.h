// Which launcher, if any, started this process, and where its ranks meet: torchrun, Slurm and mpirun leave
// variables behind; by hand RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT do.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "runtime/device.h"

namespace gradwire {

class Communicator;

struct Launch {
  std::string launcher;   // "torchrun", "Slurm", "mpirun (Open MPI)", ...
  std::string variables;  // "RANK=1 WORLD_SIZE=4"
  int rank = 0, world = 1;
  // Among the ranks on this machine; -1 and 0 where the launcher does not say.
  int local_rank = -1, local_world = 0;
  // tcp://host:port, the same on every rank; empty when nothing says where, and in a world of 1.
  std::string rendezvous;
};

// torchrun's agent may keep a store of its own on MASTER_PORT (TORCHELASTIC_USE_AGENT_STORE). Ours is then on
// MASTER_PORT + kPortsBeyond, or - kPortsBeyond where that is no port.
constexpr int kPortsBeyond = 100;

// Looks variables up through `lookup` (null: not set). Throws BadInput when a launcher's variables contradict
// themselves, or one launcher says that this process is alone while another started several.
std::optional<Launch> detect_launcher(const std::function<const char*(const char*)>& lookup);
// The same for this process.
std::optional<Launch> detect_launcher();

// Joins the other processes, through NCCL when `device` is a GPU. `rendezvous`, if not empty, goes before the
// launcher's. Throws BadInput when there is neither, or this build cannot do it.
std::unique_ptr<Communicator> join(const Launch& launch, const std::string& rendezvous, double timeout_s,
                                   Device device = Device::host());

// Processes of one machine share its cores; not where the launcher has bound each to cores of its own, or
// GRADWIRE_THREADS says how many.
void share_cores(const Launch& launch);

// The first name of Slurm's list of hosts: "gpu[03-05,9],login1" -> "gpu03".
std::string first_host(const std::string& slurm_list);

}  // namespace gradwire
