// The NCCL calls of the transport that are more than one call: a group of sends and receives, joining, and waiting for
// communicators that are not blocking. They touch nothing but their arguments, so they may run on any thread.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <vector>

#include "collectives/rendezvous/membership.h"
#include "collectives/transport/nccl_api.h"
#include "collectives/transport/transport.h"

namespace gradwire {

class GpuCalls;

// How long to wait for NCCL, and how.
struct NcclPatience {
  SteadyClock::time_point deadline = SteadyClock::time_point::max();
  std::function<bool()> stop = [] { return false; };
  std::function<void(std::chrono::microseconds)> pause;  // sleeps
};

// Waits until `comm` is no longer busy. `result` is what a call on it returned; blocking communicators never return
// ncclInProgress, so this is for a caller's own and for NCCL_COMM_BLOCKING=0. Polls for 100 us before it sleeps: NCCL
// takes about 20 us, and the shortest sleep about 60.
ncclResult_t settle_nccl(const NcclApi& api, ncclComm_t comm, ncclResult_t result,
                         const NcclPatience& patience);

// One group. Ends it whatever happens.
ncclResult_t run_nccl_group(const NcclApi& api, ncclComm_t comm, cudaStream_t stream,
                            const std::vector<Transfer>& transfers, const NcclPatience& patience);

// ncclAllReduce of floats, their sum or mean.
ncclResult_t run_nccl_allreduce(const NcclApi& api, ncclComm_t comm, cudaStream_t stream, const float* in,
                                float* out, int64_t count, bool mean, const NcclPatience& patience);

// Joins: returns the initialized communicator, or throws CommError at the deadline.
ncclComm_t init_nccl(const NcclApi& api, const std::shared_ptr<GpuCalls>& gpu, int rank, int world,
                     const ncclUniqueId& id, SteadyClock::time_point deadline);

}  // namespace gradwire
