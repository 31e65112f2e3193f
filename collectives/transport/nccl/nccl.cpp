#include "collectives/transport/nccl/nccl.h"

#include "runtime/util/environment.h"
#include "runtime/util/error.h"

#if defined(GRADWIRE_HAS_NCCL) && defined(GRADWIRE_HAS_CUDA)

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <atomic>
#include <cstring>

#include "collectives/transport/nccl/nccl_transport.h"
#include "runtime/device/device_cuda.h"

namespace gradwire {
namespace {

// Marks an exchange that runs once, by two events around the exchange.
class EventMark final : public ExchangeMark {
 public:
  explicit EventMark(int device) {
    detail::make_current(Device::cuda(device));
    GW_CUDA_CHECK(cudaEventCreateWithFlags(&begin_, cudaEventDisableTiming));
    const cudaError_t status = cudaEventCreateWithFlags(&end_, cudaEventDisableTiming);
    if (status != cudaSuccess) cuda::ignore(cudaEventDestroy(begin_));
    cuda::check(status, "cudaEventCreateWithFlags");
  }
  ~EventMark() override {
    cuda::ignore(cudaEventDestroy(begin_));
    cuda::ignore(cudaEventDestroy(end_));
  }
  EventMark(const EventMark&) = delete;
  void begin(const Stream& stream) override { GW_CUDA_CHECK(cudaEventRecord(begin_, stream.native())); }
  void end(const Stream& stream) override { GW_CUDA_CHECK(cudaEventRecord(end_, stream.native())); }
  Progress poll() override {
    if (reached(end_)) return Progress::done;
    return reached(begin_) ? Progress::running : Progress::queued;
  }

 private:
  static bool reached(cudaEvent_t event) {
    const cudaError_t status = cudaEventQuery(event);
    if (status == cudaErrorNotReady) return false;
    cuda::check(status, "cudaEventQuery");
    return true;
  }
  cudaEvent_t begin_ = nullptr, end_ = nullptr;
};

// Marks a captured exchange on GPUs without stream memory operations: a kernel on each side of the exchange
// increments a counter in pinned host memory. Each kernel takes about 3 us.
class CounterMark final : public ExchangeMark {
 public:
  explicit CounterMark(uint64_t* counters, std::shared_ptr<void> memory)
      : counters_(counters), memory_(std::move(memory)) {}
  void begin(const Stream& stream) override { increment(stream, &counters_[0]); }
  void end(const Stream& stream) override { increment(stream, &counters_[1]); }
  bool repeats() const override { return true; }
  uint64_t runs() const override { return read(0); }
  Progress poll() override {
    // Read the end counter before the begin counter, so that a launch between the two reads does not look
    // like a finished launch.
    const uint64_t done = read(1);
    return read(0) != done ? Progress::running : Progress::done;
  }

 private:
  uint64_t read(int which) const { return std::atomic_ref(counters_[which]).load(std::memory_order_acquire); }
  uint64_t* counters_;
  std::shared_ptr<void> memory_;
};

// Keeps this thread's calls from invalidating a capture in another thread.
class OutsideCapture {
 public:
  OutsideCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  ~OutsideCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

// Stores a value in stream order without a kernel.
using StreamWrite = CUresult (*)(CUstream, CUdeviceptr, cuuint64_t, unsigned);
bool write_word(StreamWrite function, const Stream& stream, uint64_t* word, uint64_t value) {
  return function(stream.native(), reinterpret_cast<CUdeviceptr>(word), value,
                  CU_STREAM_WRITE_VALUE_DEFAULT) == CUDA_SUCCESS;
}

// Returns the driver's cuStreamWriteValue64. Tries one write in a graph; null if the write fails.
StreamWrite find_stream_write(int device) {
  OutsideCapture guard;
  detail::make_current(Device::cuda(device));
  const auto function = cuda::driver_function<StreamWrite>("cuStreamWriteValue64", 12000);
  if (function == nullptr) return nullptr;
  const Buffer word = Buffer::pinned(Device::cuda(device), sizeof(uint64_t));
  *word.as<uint64_t>() = 0;
  const Stream stream = Stream::create(Device::cuda(device), "set-up");
  cudaGraph_t graph = nullptr;
  bool works = cudaStreamBeginCapture(stream.native(), cudaStreamCaptureModeRelaxed) == cudaSuccess;
  if (works) {
    works = write_word(function, stream, word.as<uint64_t>(), 1);
    works = cudaStreamEndCapture(stream.native(), &graph) == cudaSuccess && works;
  }
  cudaGraphExec_t executable = nullptr;
  works = works && cudaGraphInstantiate(&executable, graph, 0) == cudaSuccess &&
          cudaGraphLaunch(executable, stream.native()) == cudaSuccess &&
          cudaStreamSynchronize(stream.native()) == cudaSuccess && *word.as<uint64_t>() == 1;
  if (executable != nullptr) cuda::ignore(cudaGraphExecDestroy(executable));
  if (graph != nullptr) cuda::ignore(cudaGraphDestroy(graph));
  if (works) return function;
  cudaGetLastError();
  return nullptr;
}

class CudaCalls final : public GpuCalls {
 public:
  explicit CudaCalls(int device) : device_(device), write_(find_stream_write(device)) {}

  bool capturing(const Stream& stream) override {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    detail::make_current(Device::cuda(device_));
    GW_CUDA_CHECK(cudaStreamIsCapturing(stream.native(), &status));
    return status != cudaStreamCaptureStatusNone;
  }
  cudaStream_t native(const Stream& stream) override { return stream.native(); }
  std::unique_ptr<ExchangeMark> make_mark() override { return std::make_unique<EventMark>(device_); }

  // Returns a mark for an exchange that `stream` captures. Only the enqueuing thread calls it. A graph's
  // first exchange also counts the graph's launches.
  std::unique_ptr<ExchangeMark> make_captured_mark(const Stream& stream) override {
    if (write_ == nullptr) return std::make_unique<CounterMark>(take(2), slab_);
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    unsigned long long capture = 0;
    GW_CUDA_CHECK(cudaStreamGetCaptureInfo(stream.native(), &status, &capture));
    if (launches_ == nullptr || capture != capture_) {
      launches_ = take(1);
      launches_memory_ = slab_;
      capture_ = capture;
      increment(stream, launches_);
    }
    auto store = [function = write_](const Stream& on, uint64_t* word, uint64_t value) {
      if (!write_word(function, on, word, value)) throw DeviceError("cuStreamWriteValue64 failed");
    };
    uint64_t* const state = take(1);
    // The two words may be in different slabs.
    auto memory = std::make_shared<std::pair<std::shared_ptr<Buffer>, std::shared_ptr<Buffer>>>(
        slab_, launches_memory_);
    return std::make_unique<WrittenMark>(store, state, launches_, std::move(memory));
  }

  void enter_thread() override {
    cudaSetDevice(device_);
    cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    cudaThreadExchangeStreamCaptureMode(&mode);
  }

 private:
  // Returns zeroed words in pinned memory. Words are never reused, because a graph may run until the process
  // ends; a word takes 8 bytes.
  uint64_t* take(size_t words) {
    constexpr size_t kWords = 8192;
    if (!slab_ || used_ + words > kWords) {
      OutsideCapture guard;
      auto buffer =
          std::make_shared<Buffer>(Buffer::pinned(Device::cuda(device_), kWords * sizeof(uint64_t)));
      std::memset(buffer->data(), 0, buffer->bytes());
      slab_ = buffer;
      used_ = 0;
    }
    used_ += words;
    return slab_->as<uint64_t>() + used_ - words;
  }

  const int device_;
  const StreamWrite write_;  // null: not available
  std::shared_ptr<Buffer> slab_, launches_memory_;
  size_t used_ = 0;
  uint64_t* launches_ = nullptr;  // the launch count of the graph being captured
  unsigned long long capture_ = 0;
};

// Returns the id that all ranks use. `group`: null if NCCL's own rendezvous distributes the id.
ncclUniqueId agree_on_id(const NcclApi& api, Membership* group, SteadyClock::time_point deadline) {
  ncclUniqueId id;
  if (group == nullptr || group->rank() == 0) {
    const ncclResult_t r = api.get_unique_id(&id);
    if (r != ncclSuccess) throw CommError("ncclGetUniqueId: " + api.text(r, nullptr));
    if (group != nullptr) group->store().set("nccl/id", std::string(id.internal, sizeof id.internal));
    return id;
  }
  const std::string bytes = group->store().get("nccl/id", deadline, "waiting for rank 0 to begin with NCCL");
  if (bytes.size() != sizeof id.internal)
    throw CommError("rank 0 is a different build: its NCCL id has another size; use one build on all ranks");
  std::memcpy(id.internal, bytes.data(), bytes.size());
  return id;
}

void use_device(int device) {
  if (device < 0 || device >= cuda_device_count()) {
    throw DeviceError("cuda:{} does not exist: {} CUDA devices usable{}", device, cuda_device_count(),
                      cuda_device_count() == 0 ? " (" + cuda_unavailable_reason() + ")" : "");
  }
  detail::make_current(Device::cuda(device));
}

}  // namespace

bool built_with_nccl() {
  return true;
}

std::string nccl_unavailable_reason() {
  try {
    NcclApi::loaded();
    return "";
  } catch (const Error& error) {
    return error.what();
  }
}

std::string nccl_version() {
  return nccl_unavailable_reason().empty() ? NcclApi::loaded().version() : "";
}

std::unique_ptr<Transport> make_nccl_transport(const NcclOptions& options) {
  const NcclApi& api = NcclApi::loaded();
  use_device(options.device);
  if (options.shrinkable && (api.revoke == nullptr || api.shrink == nullptr)) {
    throw BadInput("a communicator that survives failures needs NCCL 2.28.7; this is {}", api.version());
  }
  const int rank = options.group.rank, world = options.group.world;
  const auto deadline = SteadyClock::now() + options.group.timeout;
  std::unique_ptr<Membership> group;
  if (options.group.rendezvous == "nccl://") {
    require(environment("NCCL_COMM_ID") != nullptr,
            "rendezvous nccl:// needs NCCL_COMM_ID=host:port in every rank's environment");
  } else {
    group = std::make_unique<Membership>(options.group);
  }
  const ncclUniqueId id = agree_on_id(api, group.get(), deadline);
  NcclSetup setup{.api = &api,
                  .gpu = std::make_shared<CudaCalls>(options.device),
                  .comm = nullptr,
                  .shrinkable = options.shrinkable,
                  .device = Device::cuda(options.device),
                  .timeout = options.group.timeout};
  try {
    if (group) {
      setup.options = options.group;
      setup.options.callbacks.reset();
      if (options.shrinkable) {
        setup.address = group->address(deadline);
        setup.quorum = std::make_shared<Quorum>(setup.address, group->key(), group->options().ports);
      }
      setup.contacts = exchange_contacts(*group, setup.quorum.get(), deadline);
    }
    setup.comm = init_nccl(api, setup.gpu, rank, world, id, deadline);
  } catch (const CommError& error) {
    if (group) group->store().report(error.what());
    throw;
  }
  setup.group = std::move(group);
  return std::make_unique<NcclTransport>(std::move(setup));
}

std::unique_ptr<Transport> adopt_nccl_communicator(void* nccl_comm, int device,
                                                   std::chrono::milliseconds timeout) {
  const NcclApi& api = NcclApi::loaded();
  use_device(device);
  auto comm = static_cast<ncclComm_t>(nccl_comm);
  int actual = -1;
  if (api.device(comm, &actual) == ncclSuccess && actual != device) {
    throw BadInput("the NCCL communicator is on cuda:{}, not on cuda:{}; pass its device", actual, device);
  }
  return std::make_unique<NcclTransport>(NcclSetup{.api = &api,
                                                   .gpu = std::make_shared<CudaCalls>(device),
                                                   .comm = comm,
                                                   .owned = false,
                                                   .device = Device::cuda(device),
                                                   .timeout = timeout});
}

}  // namespace gradwire

#else

namespace gradwire {

bool built_with_nccl() {
  return false;
}
std::string nccl_unavailable_reason() {
  return built_with_cuda()
             ? "this build has no NCCL transport: nccl.h was not found; install libnccl-dev, or set "
               "NCCL_ROOT, and build again"
             : "this build has no CUDA side";
}
std::string nccl_version() {
  return "";
}
std::unique_ptr<Transport> make_nccl_transport(const NcclOptions&) {
  throw BadInput("ranks cannot be processes with GPUs: " + nccl_unavailable_reason());
}
std::unique_ptr<Transport> adopt_nccl_communicator(void*, int, std::chrono::milliseconds) {
  throw BadInput("an NCCL communicator cannot be used: " + nccl_unavailable_reason());
}

}  // namespace gradwire

#endif
