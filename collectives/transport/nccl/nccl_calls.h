// The transport's compound NCCL calls: a group of sends and receives, joining, and waiting for non-blocking
// communicators. The functions access only their arguments, so they may run on any thread.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <vector>

#include "collectives/net/membership.h"
#include "collectives/transport/exchange_watch.h"
#include "collectives/transport/nccl/nccl_api.h"
#include "collectives/transport/transport.h"
#include "runtime/device/device.h"

namespace gradwire {

// CUDA functions that the transport needs besides NCCL. Tests supply other functions.
class GpuCalls {
 public:
  virtual ~GpuCalls() = default;
  virtual bool capturing(const Stream& stream) = 0;
  virtual cudaStream_t native(const Stream& stream) = 0;
  // Return a mark for an exchange that runs once, or for a captured exchange.
  virtual std::unique_ptr<ExchangeMark> make_mark() = 0;
  virtual std::unique_ptr<ExchangeMark> make_captured_mark(const Stream& stream) = 0;
  // Prepares a thread that polls marks or calls NCCL, so that the thread does not disturb captures of other
  // threads. Must be the thread's first call.
  virtual void enter_thread() {}
};

// Limits of a wait for NCCL.
struct NcclPatience {
  SteadyClock::time_point deadline = SteadyClock::time_point::max();
  std::function<bool()> stop = [] { return false; };
  std::function<void(std::chrono::microseconds)> pause;  // sleeps for this time
};

// Waits until `comm` is idle. `result`: the result of the last call on `comm`. Only non-blocking
// communicators return ncclInProgress: a caller's communicator, or a communicator created with
// NCCL_COMM_BLOCKING=0. Polls for 100 us before sleeping: NCCL takes about 20 us, and the shortest sleep
// takes about 60 us.
ncclResult_t settle_nccl(const NcclApi& api, ncclComm_t comm, ncclResult_t result,
                         const NcclPatience& patience);

// Enqueues the transfers as one NCCL group. Ends the group even on an error.
ncclResult_t run_nccl_group(const NcclApi& api, ncclComm_t comm, cudaStream_t stream,
                            const std::vector<Transfer>& transfers, const NcclPatience& patience);

ncclResult_t run_nccl_allreduce(const NcclApi& api, ncclComm_t comm, cudaStream_t stream, const float* in,
                                float* out, int64_t count, bool mean, const NcclPatience& patience);

// Returns the initialized communicator. Throws CommError at the deadline.
ncclComm_t init_nccl(const NcclApi& api, const std::shared_ptr<GpuCalls>& gpu, int rank, int world,
                     const ncclUniqueId& id, SteadyClock::time_point deadline);

}  // namespace gradwire
