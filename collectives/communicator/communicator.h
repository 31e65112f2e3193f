// A rank's membership in a group of ranks: its transport, its link costs, and its placement on nodes.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "collectives/plan/planner.h"
#include "collectives/schedule/schedule.h"
#include "collectives/transport/emulated_link.h"
#include "collectives/transport/transport.h"
#include "runtime/device/device.h"

namespace gradwire {

class Communicator {
 public:
  // Creates ranks as threads of one process: communicators[r] is for rank r only, on devices[r]. Several
  // ranks may share a device. An operation that waits longer than `timeout` for a peer throws CommError on
  // every rank.
  static std::vector<std::unique_ptr<Communicator>> create_local(const std::vector<Device>& devices,
                                                                 std::chrono::milliseconds timeout);
  // Creates a world of 1.
  static std::unique_ptr<Communicator> create_single(Device device);
  // Creates one rank of a group of processes: transport/tcp/tcp.h and transport/nccl/nccl.h connect them.
  explicit Communicator(std::unique_ptr<Transport> transport) : transport_(std::move(transport)) {}

  int rank() const { return transport_->rank(); }
  int world() const { return transport_->world(); }
  Device device() const { return transport_->device(); }
  Transport& transport() { return *transport_; }

  // Sets how ranks are placed on nodes: rank = node * ranks_per_node + local index. 0, the default: unknown.
  // Hierarchical schedules need a known placement. All ranks must set the same value, before they create
  // reducers. Throws BadInput unless `ranks` divides the world size.
  void set_ranks_per_node(int ranks);
  // Sets ranks_per_node to `ranks_here`, the number of ranks on this rank's machine (0: unknown). Sets
  // ranks_per_node to 0 if the ranks pass different numbers or the number does not divide the world size.
  // Collective; blocks.
  void agree_on_ranks_per_node(int ranks_here);
  int ranks_per_node() const { return ranks_per_node_; }

  // Returns the link costs for a planner of this kind. Costs are needed only if there is a choice:
  // schedule=auto with more than two ranks. The first such call measures the costs, within 0.3 s and 5 % of
  // the timeout: this call is collective and blocks, and the exchanges run on `stream`. Until then, other
  // kinds get assumed costs, and messages of at most 384 KiB between processes on the host. Groups in one
  // process use LinkCosts' defaults, so that every run gives the same bits. Groups of the same ranks, or of
  // survivors, do not measure again.
  const LinkCosts& link_costs(const Stream& stream, ScheduleKind kind);
  void set_link_costs(const LinkCosts& costs);

  // Returns the stream for exchanges that overlap with kernels, shared by all users of this communicator.
  // Transports execute a rank's exchanges in the order in which the exchanges were enqueued, even on several
  // streams. So a second stream would only add waits.
  const Stream& transfers();
  // Blocks until transfers() is idle. Never throws, because the failed operation reports its failure. Does
  // not create the stream, so that destructors may call finish_transfers() when no thread can be started.
  void finish_transfers() noexcept;

  // Returns the number of bytes that this rank has sent so far.
  uint64_t bytes_sent() const { return transport_->bytes_sent(); }
  // Fails every pending and later operation of every rank of the group with `reason`. Any thread may call it.
  void abort(const std::string& reason) { transport_->abort(reason); }
  // Throws CommError once the group has failed. On CUDA, call check() after synchronizing a stream and before
  // using the results.
  void check() { transport_->check(); }
  // Returns how long this rank has waited for data of each rank, in seconds; empty if not measured.
  std::vector<double> waited_s() const { return transport_->waited_s(); }
  // Returns a communicator of a failed group's survivors. The survivors agree on the members: see
  // Transport::regroup(). Requires TCP or NCCL, and a communicator created with `shrinkable`. Afterwards
  // this communicator can only be destroyed.
  std::unique_ptr<Communicator> regroup(std::chrono::milliseconds timeout, std::vector<int>& survivors);
  // Returns a new group of these ranks and the waiting joiners; null without joiners: see Transport::grow().
  // Requires TCP, and a communicator created with `shrinkable`. After a success this communicator can only be
  // destroyed.
  std::unique_ptr<Communicator> grow();
  // Returns a group of the ranks that pass the same `color`, ordered by `key`, then by their rank in this
  // group; null for a rank with a negative color. The new group is not notified of failures of this group.
  // Collective; blocks.
  std::unique_ptr<Communicator> split(int color, int key);
  // Blocks until all ranks have called barrier(). For set-up and between epochs, not in a step.
  void barrier() { transport_->barrier(); }
  // Send and receive short messages to rank 0, for reports. Available only between processes: see
  // Transport::send_message().
  void send_message(const std::string& message) { transport_->send_message(message); }
  std::string take_message(int from) { return transport_->take_message(from); }

 private:
  // Returns a communicator of the next group; null if `transport` is.
  std::unique_ptr<Communicator> successor(std::unique_ptr<Transport> transport) const;

  std::unique_ptr<Transport> transport_;
  int ranks_per_node_ = 0;
  std::optional<LinkCosts> link_costs_;
  std::optional<LinkCosts> known_;  // of the group before this group; the ranks have not compared them
  Stream transfers_;                // last member: destroyed before the transport that the stream's tasks use
};

// The ranks of one process, each on a thread.

// Creates ranks as threads: Communicator::create_local(). `link`: if set, the ranks' messages pass through
// emulated links. schedule=auto then chooses by the links' speed, which is the same in every run.
std::vector<std::unique_ptr<Communicator>> create_local_ranks(const std::vector<Device>& devices,
                                                              std::chrono::milliseconds timeout,
                                                              const EmulatedLink& link);

// Runs body(communicator) for each communicator of `group`, each on a separate thread. Returns once all
// bodies have returned. The first exception aborts the communicators of the other ranks and is rethrown. A
// failure to start a thread counts as an exception.
void run_local_ranks(const std::vector<std::unique_ptr<Communicator>>& group,
                     const std::function<void(Communicator&)>& body);

}  // namespace gradwire
