// Ranks as processes with one GPU each: NCCL moves the bytes, as one group of sends and receives per
// exchange, on the caller's stream. The host waits for nothing, so an exchange can be captured in a CUDA graph; the
// first exchange with a peer connects to it and blocks until it does too.
//
// Communicators are blocking: on others NCCL creates a thread for every group (2.28.9), and the host must ask when that
// thread is done. What may wait for a peer inside NCCL, which is joining, the first exchange with a peer, shrinking and
// finalizing, runs on a thread of its own and has a deadline; every later exchange is made by the caller's thread.
//
// One thread per communicator watches the enqueued exchanges (exchange_watch.h), calls that do not return, and NCCL's
// own errors. If an exchange is overdue, or NCCL or another rank reports an error, it aborts the communicator: kernels
// that wait for a peer end, leaving whatever is in the buffers. From then on every call throws CommError, including
// check(), which must be called after synchronizing a stream and before using the result.
//
// In addition to NCCL's connections each rank has one to rank 0 (rendezvous/store.h): for the rendezvous, for
// failures, and to compare calls. A new call is compared with the neighbour's before data moves; later calls
// with the same hash are not, because the host would have to wait.
#pragma once

#include <chrono>
#include <memory>
#include <string>

#include "collectives/rendezvous/membership.h"
#include "collectives/transport/transport.h"

namespace gradwire {

// Whether this binary contains the NCCL transport, which needs nccl.h and nvcc at build time.
bool built_with_nccl();
// Why the NCCL transport cannot be used, with the remedy; empty if it can. Loads NCCL.
std::string nccl_unavailable_reason();
// Version of the loaded library, e.g. "2.28.9"; empty if there is none.
std::string nccl_version();

struct NcclOptions {
  // A rendezvous as in membership.h, or "nccl://": NCCL's own, at NCCL_COMM_ID=host:port, set on every rank.
  // Then there is no store: errors name fewer ranks, and calls are not compared.
  GroupOptions group;
  int device = 0;  // CUDA device
  // A failure revokes the communicator (NCCL 2.28.7) instead of aborting it, so that shrink() can follow, or regroup(),
  // which needs a store. The same on every rank.
  bool shrinkable = false;
};

// Blocks until all ranks have joined. Throws BadInput for invalid options or if NCCL is missing, CommError
// when a rank does not join in time.
std::unique_ptr<Transport> make_nccl_transport(const NcclOptions& options);

// Uses the caller's communicator, an ncclComm_t: it is neither aborted nor destroyed here and must outlive
// the transport. A timeout of 0: nothing is watched; that is left to the communicator's owner.
std::unique_ptr<Transport> adopt_nccl_communicator(void* nccl_comm, int device,
                                                   std::chrono::milliseconds timeout);

}  // namespace gradwire
