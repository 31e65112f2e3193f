// Ranks as processes with a GPU each: NCCL moves the bytes, as sends and receives in one group per exchange,
// on the stream of the caller. Nothing but NCCL's own state is waited for on the host, so an exchange can be
// captured in a CUDA graph; the first exchange with a peer connects to it and blocks until the peer is there
// too.
//
// Communicators are non-blocking, because only those can be aborted reliably. A thread per communicator
// watches the exchanges that are enqueued (exchange_watch.h) and NCCL's own errors. When one is overdue, NCCL
// reports an error, or another rank does, it aborts the communicator: kernels that wait for a peer end,
// whatever is in the buffers by then. From that moment on every call throws CommError, check() too, which
// whoever synchronizes a stream calls before trusting the result.
//
// Beside NCCL's connections each rank has one to rank 0 (rendezvous/store.h): for the first meeting, for
// failures, and to compare calls. A call that is new is compared with the neighbour's before data moves;
// those that follow with the same hash are not, since that would take the host to wait.
#pragma once

#include <chrono>
#include <memory>
#include <string>

#include "collectives/rendezvous/membership.h"
#include "collectives/transport/transport.h"

namespace gradwire {

// True when this binary holds the NCCL transport: nccl.h and nvcc were there when it was built.
bool built_with_nccl();
// Why the NCCL transport cannot be used now, in a few words with the remedy; empty when it can. Loads NCCL.
std::string nccl_unavailable_reason();
// "2.28.9", of the library that is loaded; empty when there is none.
std::string nccl_version();

struct NcclOptions {
  // Its rendezvous is as membership.h has it, or "nccl://": NCCL's own, at NCCL_COMM_ID=host:port, which is
  // set on every rank. Then there is no store: errors name fewer ranks, and calls are not compared.
  GroupOptions group;
  int device = 0;  // CUDA device
  // A failure revokes the communicator (NCCL 2.28.7) instead of aborting it, so that shrink() can follow.
  bool shrinkable = false;
};

// Blocks until all ranks are there. Throws BadInput for options that cannot work or where NCCL is missing,
// CommError when a rank does not come in time.
std::unique_ptr<Transport> make_nccl_transport(const NcclOptions& options);

// On a communicator of somebody else's, an ncclComm_t: it is neither aborted nor destroyed here and outlives
// the transport. A timeout of 0: nothing is watched; that is left to whoever owns the communicator.
std::unique_ptr<Transport> adopt_nccl_communicator(void* nccl_comm, int device,
                                                   std::chrono::milliseconds timeout);

}  // namespace gradwire
