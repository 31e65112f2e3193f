// NCCL between threads of one process, each with a simulated GPU: libnccl.so.2 for the interposer's tests.
//
// Messages pass through host memory. ncclGroupEnd sends, then receives, and returns when the data has
// arrived.
#include <cuda_runtime_api.h>
#include <nccl.h>

#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

namespace {

using Message = std::vector<char>;

struct Wire {
  std::mutex mutex;
  std::condition_variable changed;
  std::map<std::pair<int, int>, std::deque<Message>> boxes;  // messages by (from, to)
};

struct Transfer {
  bool send;
  void* data;
  size_t bytes;
  int peer;
  ncclComm_t comm;
  cudaStream_t stream;
};

thread_local int depth = 0;
thread_local std::vector<Transfer> transfers;

ncclResult_t copy(void* to, const void* from, size_t bytes, cudaStream_t stream) {
  const cudaError_t status = cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream);
  return status == cudaSuccess && cudaStreamSynchronize(stream) == cudaSuccess ? ncclSuccess
                                                                               : ncclUnhandledCudaError;
}

}  // namespace

struct ncclComm {
  std::shared_ptr<Wire> wire;
  int rank = 0, world = 1, device = 0;

  void send(int to, Message message) const {
    const std::lock_guard lock(wire->mutex);
    wire->boxes[{rank, to}].push_back(std::move(message));
    wire->changed.notify_all();
  }
  Message receive(int from) const {
    std::unique_lock lock(wire->mutex);
    std::deque<Message>& box = wire->boxes[{from, rank}];
    wire->changed.wait(lock, [&] { return !box.empty(); });
    Message message = std::move(box.front());
    box.pop_front();
    return message;
  }
};

extern "C" {

ncclResult_t ncclGetVersion(int* version) {
  return *version = NCCL_VERSION_CODE, ncclSuccess;
}
const char* ncclGetErrorString(ncclResult_t) {
  return "an error of the stand-in";
}
ncclResult_t ncclCommInitAll(ncclComm_t* comms, int count, const int* devices) {
  const auto wire = std::make_shared<Wire>();
  for (int rank = 0; rank < count; ++rank) comms[rank] = new ncclComm{wire, rank, count, devices[rank]};
  return ncclSuccess;
}
ncclResult_t ncclCommDestroy(ncclComm_t comm) {
  delete comm;
  return ncclSuccess;
}
ncclResult_t ncclCommAbort(ncclComm_t comm) {
  return ncclCommDestroy(comm);
}
ncclResult_t ncclCommFinalize(ncclComm_t) {
  return ncclSuccess;
}
ncclResult_t ncclCommGetAsyncError(ncclComm_t, ncclResult_t* error) {
  return *error = ncclSuccess, ncclSuccess;
}
ncclResult_t ncclCommCount(const ncclComm_t comm, int* count) {
  return *count = comm->world, ncclSuccess;
}
ncclResult_t ncclCommUserRank(const ncclComm_t comm, int* rank) {
  return *rank = comm->rank, ncclSuccess;
}
ncclResult_t ncclCommCuDevice(const ncclComm_t comm, int* device) {
  return *device = comm->device, ncclSuccess;
}

ncclResult_t ncclGroupStart() {
  return ++depth, ncclSuccess;
}
ncclResult_t ncclSend(const void* data, size_t count, ncclDataType_t, int peer, ncclComm_t comm,
                      cudaStream_t stream) {  // the transport sends bytes only
  return transfers.push_back({true, const_cast<void*>(data), count, peer, comm, stream}), ncclSuccess;
}
ncclResult_t ncclRecv(void* data, size_t count, ncclDataType_t, int peer, ncclComm_t comm,
                      cudaStream_t stream) {
  return transfers.push_back({false, data, count, peer, comm, stream}), ncclSuccess;
}
ncclResult_t ncclGroupEnd() {
  if (--depth > 0) return ncclSuccess;
  const std::vector<Transfer> group = std::exchange(transfers, {});
  for (const Transfer& t : group) {
    if (!t.send) continue;
    Message message(t.bytes);
    if (copy(message.data(), t.data, t.bytes, t.stream) != ncclSuccess) return ncclUnhandledCudaError;
    t.comm->send(t.peer, std::move(message));
  }
  for (const Transfer& t : group) {
    if (t.send) continue;
    const Message message = t.comm->receive(t.peer);
    if (message.size() != t.bytes) return ncclInvalidArgument;
    if (copy(t.data, message.data(), t.bytes, t.stream) != ncclSuccess) return ncclUnhandledCudaError;
  }
  return ncclSuccess;
}

// Sums float32 values.
ncclResult_t ncclAllReduce(const void* in, void* out, size_t count, ncclDataType_t type, ncclRedOp_t op,
                           ncclComm_t comm, cudaStream_t stream) {
  if (type != ncclFloat32 || op != ncclSum) return ncclInvalidArgument;
  Message mine(count * sizeof(float));
  if (copy(mine.data(), in, mine.size(), stream) != ncclSuccess) return ncclUnhandledCudaError;
  for (int to = 0; to < comm->world; ++to) {
    if (to != comm->rank) comm->send(to, mine);
  }
  auto* const sum = reinterpret_cast<float*>(mine.data());
  for (int from = 0; from < comm->world; ++from) {
    if (from == comm->rank) continue;
    const Message theirs = comm->receive(from);
    for (size_t i = 0; i < count; ++i) sum[i] += reinterpret_cast<const float*>(theirs.data())[i];
  }
  return copy(out, mine.data(), mine.size(), stream);
}

// Gradwire asks for these functions when it loads NCCL. The tests call none of them.
ncclResult_t ncclGetUniqueId(ncclUniqueId*) {
  return ncclInvalidUsage;
}
ncclResult_t ncclCommInitRankConfig(ncclComm_t*, int, ncclUniqueId, int, ncclConfig_t*) {
  return ncclInvalidUsage;
}
ncclResult_t ncclCommSplit(ncclComm_t, int, int, ncclComm_t*, ncclConfig_t*) {
  return ncclInvalidUsage;
}

}  // extern "C"
