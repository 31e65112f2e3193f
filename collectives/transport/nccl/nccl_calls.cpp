#ifdef GRADWIRE_HAS_NCCL

#include "collectives/transport/nccl/nccl_calls.h"

#include <fmt/format.h>

#include <algorithm>
#include <mutex>
#include <thread>

#include "collectives/transport/exchange_watch.h"
#include "runtime/util/error.h"

namespace gradwire {

using std::chrono::microseconds;

ncclResult_t settle_nccl(const NcclApi& api, ncclComm_t comm, ncclResult_t result,
                         const NcclPatience& patience) {
  if (result != ncclInProgress) return result;
  const auto begin = SteadyClock::now();
  auto pause = microseconds(50);
  for (auto now = begin; result == ncclInProgress && now < patience.deadline && !patience.stop();
       now = SteadyClock::now()) {
    if (now - begin < microseconds(100)) {
      std::this_thread::yield();
    } else {
      patience.pause(pause);
      pause = std::min(2 * pause, microseconds(500));
    }
    if (api.async_error(comm, &result) != ncclSuccess) result = ncclInternalError;
  }
  return result;
}

ncclResult_t run_nccl_group(const NcclApi& api, ncclComm_t comm, cudaStream_t stream,
                            const std::vector<Transfer>& transfers, const NcclPatience& patience) {
  ncclResult_t result = api.group_start();
  if (result != ncclSuccess) return result;
  for (const Transfer& t : transfers) {
    if (t.bytes == 0 || result != ncclSuccess) continue;
    result = t.kind == Transfer::Kind::send ? api.send(t.data, t.bytes, ncclUint8, t.peer, comm, stream)
                                            : api.receive(t.data, t.bytes, ncclUint8, t.peer, comm, stream);
    if (result == ncclInProgress) result = ncclSuccess;  // group_end() returns the real result
  }
  const ncclResult_t ended = api.group_end();
  return settle_nccl(api, comm, result == ncclSuccess ? ended : result, patience);
}

ncclResult_t run_nccl_allreduce(const NcclApi& api, ncclComm_t comm, cudaStream_t stream, const float* in,
                                float* out, int64_t count, bool mean, const NcclPatience& patience) {
  return settle_nccl(api, comm,
                     api.all_reduce(in, out, static_cast<size_t>(count), ncclFloat32,
                                    mean ? ncclAvg : ncclSum, comm, stream),
                     patience);
}

ncclComm_t init_nccl(const NcclApi& api, const std::shared_ptr<GpuCalls>& gpu, int rank, int world,
                     const ncclUniqueId& id, SteadyClock::time_point deadline) {
  struct Joining {
    ncclComm_t comm = nullptr;
    ncclResult_t result = ncclInProgress;
    std::mutex mutex;
    bool done = false, given_up = false;
  };
  const auto joining = std::make_shared<Joining>();
  auto join = [joining, &api, gpu, rank, world, id, deadline] {
    gpu->enter_thread();
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 1;
    ncclComm_t comm = nullptr;
    ncclResult_t result = api.init_rank(&comm, world, id, rank, &config);
    result = settle_nccl(api, comm, result, {.deadline = deadline, .pause = [](microseconds time) {
                                               std::this_thread::sleep_for(time);
                                             }});
    std::lock_guard lock(joining->mutex);
    joining->comm = comm;
    joining->result = result;
    joining->done = true;
    if (joining->given_up && comm != nullptr) api.abort(comm);  // the communicator has no other owner
  };
  run_with_deadline(std::move(join), deadline + std::chrono::milliseconds(100));
  std::lock_guard lock(joining->mutex);
  if (joining->done && joining->result == ncclSuccess) return joining->comm;
  joining->given_up = true;
  const std::string why = joining->result == ncclInProgress ? "no progress until the deadline"
                                                            : api.text(joining->result, joining->comm);
  if (joining->comm != nullptr) api.abort(joining->comm);
  throw CommError(
      fmt::format("rank {} of {}: joining through NCCL: {}; NCCL_DEBUG=INFO says more", rank, world, why));
}

}  // namespace gradwire

#endif  // GRADWIRE_HAS_NCCL
