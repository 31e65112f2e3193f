// Ranks as processes with one GPU each. NCCL moves the bytes: one group of sends and receives per exchange,
// on the caller's stream. The host does not wait, so an exchange can be captured in a CUDA graph. The first
// exchange with a peer connects to the peer and blocks until the peer connects as well.
//
// Communicators are blocking: for non-blocking communicators NCCL creates a thread per group (2.28.9), and
// the host must poll for that thread's end. Operations that may wait for a peer inside NCCL (joining, the
// first exchange with a peer, deriving, finalizing) run on a separate thread with a deadline. Later exchanges
// run on the caller's thread.
//
// One thread per communicator watches enqueued exchanges (exchange_watch.h), calls that do not return, and
// NCCL's errors. If an exchange is overdue, or NCCL or another rank reports an error, the thread aborts the
// communicator: kernels that wait for a peer end and leave undefined data in the buffers. From then on every
// call throws CommError, including check(). The caller must call check() after synchronizing a stream and
// before using the result.
//
// Each rank also has a connection to rank 0 (net/store.h) for the rendezvous, for failures, and to compare
// calls. A rank compares a call of a new hash with its neighbour's call before data moves. The rank does not
// compare later calls with the same hash, because the host would have to wait.
#pragma once

#include <chrono>
#include <memory>
#include <string>

#include "collectives/net/membership.h"
#include "collectives/transport/transport.h"

namespace gradwire {

// Returns whether this binary contains the NCCL transport, which needs nccl.h and nvcc at build time.
bool built_with_nccl();
// Returns why the NCCL transport is unavailable, and the remedy; "" if the transport is available. Loads
// NCCL.
std::string nccl_unavailable_reason();
// Returns the loaded NCCL library's version, e.g. "2.28.9"; "" if the library is not loaded.
std::string nccl_version();

struct NcclOptions {
  // A rendezvous as in membership.h, or "nccl://": NCCL's rendezvous at NCCL_COMM_ID=host:port, set on every
  // rank. With "nccl://" there is no store: errors name fewer ranks, and calls are not compared.
  GroupOptions group;
  int device = 0;  // CUDA device
  // On failure, revoke the communicator (NCCL 2.28.7) instead of aborting it, so that regroup() can follow.
  // Needs a store. Must be the same on every rank.
  bool shrinkable = false;
};

// Creates this rank's transport. Blocks until all ranks have joined. Throws BadInput for invalid options or a
// missing NCCL, CommError if a rank does not join in time.
std::unique_ptr<Transport> make_nccl_transport(const NcclOptions& options);

// Creates a transport that uses the caller's communicator, an ncclComm_t, which must outlive the transport.
// The transport neither aborts nor destroys the communicator. Timeout 0: the transport does not watch
// exchanges; the communicator's owner watches them.
std::unique_ptr<Transport> adopt_nccl_communicator(void* nccl_comm, int device,
                                                   std::chrono::milliseconds timeout);

}  // namespace gradwire
