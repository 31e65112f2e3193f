// A rank's membership in a group of ranks: its transport, its link costs, and its placement on nodes.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "collectives/plan/link_costs.h"
#include "collectives/schedule/schedule.h"
#include "runtime/device.h"

namespace gradwire {

struct Doors;
struct TcpOptions;
struct NcclOptions;
class Transport;

class Communicator {
 public:
  // Ranks as threads of one process: communicators[r] is for rank r only, on devices[r]. Several ranks may
  // share a device. An operation that waits longer than `timeout` for a peer throws CommError on every rank.
  static std::vector<std::unique_ptr<Communicator>> create_local(const std::vector<Device>& devices,
                                                                 std::chrono::milliseconds timeout);
  // One rank of a group of processes, on the host. Blocks until all ranks have joined; throws CommError at
  // the timeout. See transport/tcp.h.
  static std::unique_ptr<Communicator> create_tcp(const TcpOptions& options);
  // A new rank of a group that is running: see transport/tcp.h.
  static std::unique_ptr<Communicator> join_tcp(const TcpOptions& options, const Doors& doors);
  // One rank of a group of processes, on a GPU. Blocks until all ranks have joined; throws CommError at the
  // timeout. See transport/nccl.h.
  static std::unique_ptr<Communicator> create_nccl(const NcclOptions& options);
  // Uses the caller's ncclComm_t, which remains the caller's.
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

  // How ranks are placed on nodes: rank = node * ranks_per_node + local index. 0, the default: unknown.
  // Needed by hierarchical schedules; set it before creating reducers, to the same value on every rank.
  // Throws BadInput unless it divides the world.
  void set_ranks_per_node(int ranks);
  // The same, from the number of ranks that each rank sees on its own machine (0: unknown). Collective, and
  // blocks. Sets the number that all ranks agree on, or 0 if they differ or it does not divide the world.
  void agree_on_ranks_per_node(int ranks_here);
  int ranks_per_node() const { return ranks_per_node_; }

  // The costs from which schedule=auto chooses: measured on first use (then collective, and blocks; the
  // exchanges run on `stream`), unless they were set. Groups in one process start with LinkCosts' defaults
  // instead, so that every run gives the same bits.
  const LinkCosts& link_costs(const Stream& stream);
  void set_link_costs(const LinkCosts& costs);

  // Why ranks do not read each other's memory where transport=lsa lets a schedule of this kind do so: inside nodes, or
  // everywhere. Empty if they do. Collective, and blocks.
  std::string lsa_obstacle(ScheduleKind kind);

  // The stream for exchanges that overlap with kernels, for all users of this communicator. One, not one per user: a
  // transport makes the exchanges of a rank in the order in which they were enqueued, and so does NCCL those of a
  // communicator, on whatever streams; a second stream would add waiting and hide none.
  const Stream& transfers();
  // Blocks until that stream is idle. Never throws: a failure belongs to the operation that failed. Does not create
  // the stream, so that destructors may call it when no thread can be started.
  void finish_transfers() noexcept;

  // Bytes this rank has sent so far, counted where they leave.
  uint64_t bytes_sent() const;
  // Fails every pending and later operation of every rank of the group with `reason`. Any thread may call it.
  void abort(const std::string& reason);
  // Throws CommError once the group has failed. On CUDA: call it after synchronizing a stream, before using
  // the results.
  void check();
  // How long this rank has waited for data of each rank, in seconds; empty where that is not measured.
  std::vector<double> waited_s() const;
  // A new communicator of the remaining ranks, in their order; `excluded` lists the lost ones, identically on
  // every remaining rank. Afterwards this communicator can only be destroyed. NCCL only, and after a failure
  // only if it was created `shrinkable`.
  std::unique_ptr<Communicator> shrink(const std::vector<int>& excluded);
  // The ranks that are left of a failed group, who find out by themselves who they are: see Transport::regroup().
  // TCP and NCCL, if it was created `shrinkable`. Afterwards this communicator can only be destroyed.
  std::unique_ptr<Communicator> regroup(std::chrono::milliseconds timeout, std::vector<int>& survivors);
  // These ranks and those that wait to join, as a new group, or null: see Transport::grow(). TCP only, if it was created
  // `shrinkable`. After a success this communicator can only be destroyed.
  std::unique_ptr<Communicator> grow();
  // The ranks that pass the same `color`, ordered by `key`, then by their rank here, as a group of their own; null for
  // a rank with a negative color. Collective, and blocks. The new group does not hear of this one's failures.
  std::unique_ptr<Communicator> split(int color, int key);
  // Blocks the calling thread until all ranks have called it. For set-up and between epochs, not in a step.
  void barrier();
  // Short messages to rank 0 for reports, between processes only: see Transport.
  void send_message(const std::string& message);
  std::string take_message(int from);

 private:
  std::unique_ptr<Transport> transport_;
  int ranks_per_node_ = 0;
  std::optional<LinkCosts> link_costs_;
  Stream transfers_;  // last: destroyed first, before the transport that its tasks use
};

}  // namespace gradwire
