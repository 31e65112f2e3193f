// A rank's membership in a group of ranks: its transport, its deadline, and the order of its operations.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "collectives/plan/link_costs.h"
#include "runtime/device.h"

namespace gradwire {

struct TcpOptions;
struct NcclOptions;
class Transport;

class Communicator {
 public:
  // Ranks that live in one process, one thread each: communicators[r] is for rank r alone, on devices[r].
  // Several ranks may share a device. An operation that waits longer than `timeout` for a peer throws
  // CommError on every rank.
  static std::vector<std::unique_ptr<Communicator>> create_local(const std::vector<Device>& devices,
                                                                 std::chrono::milliseconds timeout);
  // One rank of a group of processes, on the host. Blocks until all ranks are there; throws CommError at the
  // timeout. See transport/tcp.h.
  static std::unique_ptr<Communicator> create_tcp(const TcpOptions& options);
  // One rank of a group of processes, on a GPU. Blocks until all ranks are there; throws CommError at the
  // timeout. See transport/nccl.h.
  static std::unique_ptr<Communicator> create_nccl(const NcclOptions& options);
  // On an ncclComm_t of somebody else's, who keeps it.
  static std::unique_ptr<Communicator> adopt_nccl(void* nccl_comm, int device,
                                                  std::chrono::milliseconds timeout);
  // A world of 1.
  static std::unique_ptr<Communicator> create_single(Device device);
  explicit Communicator(std::unique_ptr<Transport> transport);
  ~Communicator();

  int rank() const;
  int world() const;
  Device device() const;
  Transport& transport() { return *transport_; }

  // How ranks sit in nodes: rank = node * ranks_per_node + local index. 0, the default: unknown. What
  // hierarchical schedules are made from; set it before reducers are made, the same on every rank. Throws
  // BadInput unless it divides the world.
  void set_ranks_per_node(int ranks);
  // The same from what each rank knows of its own machine (0: nothing). Collective, and blocks. Sets what all
  // of them say, and "unknown" when they differ or it does not divide the world.
  void agree_on_ranks_per_node(int ranks_here);
  int ranks_per_node() const { return ranks_per_node_; }

  // What schedule=auto decides by: measured when it is first asked for (collective then, and blocks; the
  // exchanges run on `stream`), unless it was set. Groups in one process start with LinkCosts' defaults
  // instead, so that a run gives the same bits each time.
  const LinkCosts& link_costs(const Stream& stream);
  void set_link_costs(const LinkCosts& costs) { link_costs_ = costs; }

  // Where exchanges run that overlap with kernels, for everything that uses this communicator; made when it
  // is first asked for.
  const Stream& transfers();

  // Bytes this rank has sent so far, counted where they leave.
  uint64_t bytes_sent() const;
  // Makes every pending and later operation of every rank of the group fail with `reason`. Any thread may
  // call it.
  void abort(const std::string& reason);
  // Throws CommError once the group has failed. On CUDA: after synchronizing a stream, and before trusting
  // what operations left there.
  void check();
  // A new communicator of the ranks that stay, in their order; `excluded` are those that are lost, the same
  // list on every rank that stays. This one is good for nothing but being destroyed then. NCCL only, and
  // after a failure only where it was created `shrinkable`.
  std::unique_ptr<Communicator> shrink(const std::vector<int>& excluded);
  // Blocks the calling thread until all ranks have called it. For set-up and between epochs, not for the
  // step.
  void barrier();
  // Short messages to rank 0 for reports, between processes: see Transport.
  void send_message(const std::string& message);
  std::string take_message(int from);

 private:
  std::unique_ptr<Transport> transport_;
  int ranks_per_node_ = 0;
  std::optional<LinkCosts> link_costs_;
  Stream transfers_;  // last: destroyed first, before the transport that its tasks use
};

}  // namespace gradwire
