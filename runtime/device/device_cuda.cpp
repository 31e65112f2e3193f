// Streams, events and memory on CUDA.
#include <cuda.h>
#include <cuda_profiler_api.h>
#include <fmt/core.h>

#include <limits>
#include <map>
#include <mutex>
#include <tuple>
#include <utility>

#include "runtime/device/device.h"
#include "runtime/device/device_cuda.h"
#include "runtime/device/device_impl.h"
#include "runtime/device/nvtx.h"
#include "runtime/threads/thread.h"
#include "runtime/util/environment.h"

namespace gradwire::cuda {
namespace {

struct CudaStreamImpl final : Stream::Impl {
  CudaStreamImpl(int index, std::string name, CudaStream handle, bool owned, Stream::Priority priority)
      : Impl(Device::cuda(index), std::move(name), priority), handle(handle), owned(owned) {}
  ~CudaStreamImpl() override {
    if (owned) ignore(cudaStreamDestroy(handle));
  }
  void submit(std::function<void()>) override {
    throw DeviceError("Stream::submit: '{}' is a CUDA stream; host tasks need a host stream", name);
  }
  void wait(const Event::Impl& event) override;
  void synchronize() override {
    set_device(device.index);
    GW_CUDA_CHECK(cudaStreamSynchronize(handle));
  }
  CudaStream native() const override { return handle; }

  CudaStream handle;
  bool owned;
};

struct CudaEventImpl final : Event::Impl {
  CudaEventImpl(int index, bool timer) : Impl(Device::cuda(index), timer) {
    set_device(index);
    // With blocking synchronization, waiting threads sleep. With a rank per GPU, spinning would occupy the
    // loaders' cores.
    GW_CUDA_CHECK(cudaEventCreateWithFlags(
        &handle, timer ? cudaEventBlockingSync : cudaEventBlockingSync | cudaEventDisableTiming));
  }
  ~CudaEventImpl() override { ignore(cudaEventDestroy(handle)); }
  void record(Stream::Impl& stream) override {
    set_device(device.index);
    // A timer in a graph is a node that marks the timer at each launch; any other event is only an edge.
    if (timer && capture != 0) {
      GW_CUDA_CHECK(cudaEventRecordWithFlags(handle, stream.native(), cudaEventRecordExternal));
    } else {
      GW_CUDA_CHECK(cudaEventRecord(handle, stream.native()));
    }
    recorded = true;
  }
  bool query() const override {
    if (!recorded) return true;
    cudaError_t status = cudaEventQuery(handle);
    if (status == cudaErrorNotReady) return false;
    check(status, "cudaEventQuery");
    return true;
  }
  void synchronize() const override {
    if (recorded) GW_CUDA_CHECK(cudaEventSynchronize(handle));
  }
  double ms_since(const Impl& start) const override {
    float ms = 0;
    GW_CUDA_CHECK(cudaEventElapsedTime(&ms, dynamic_cast<const CudaEventImpl&>(start).handle, handle));
    return ms;
  }

  cudaEvent_t handle = nullptr;
  bool recorded = false;
};

void CudaStreamImpl::wait(const Event::Impl& event) {
  const auto* cuda_event = dynamic_cast<const CudaEventImpl*>(&event);
  if (cuda_event == nullptr)
    throw DeviceError("a CUDA stream cannot wait for an event of {}", event.device.name());
  if (!cuda_event->recorded) return;
  set_device(device.index);
  GW_CUDA_CHECK(cudaStreamWaitEvent(handle, cuda_event->handle, 0));
}

}  // namespace

void set_device(int device_index) {
  detail::CallersDevice::will_change_to(device_index);
  GW_CUDA_CHECK(cudaSetDevice(device_index));
}

void restore_device(int device_index) noexcept {
  static const auto state =
      driver_function<CUresult (*)(CUdevice, unsigned*, int*)>("cuDevicePrimaryCtxGetState", 7000);
  unsigned flags = 0;
  int active = 0;
  // In the driver's API, a device's ordinal is its handle.
  const bool has_context =
      state == nullptr || state(device_index, &flags, &active) != CUDA_SUCCESS || active != 0;
  if (has_context) ignore(cudaSetDevice(device_index));
}

int device_count() {
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess) {
    cudaGetLastError();
    return 0;
  }
  return count;
}

namespace {
// Returns why cudaGetDeviceCount failed with `status`. Clears the error.
std::string why_uncounted(cudaError_t status) {
  cudaGetLastError();
  // Without a driver CUDA reports an insufficient driver, which is misleading.
  int driver = 0;
  if (cudaDriverGetVersion(&driver) == cudaSuccess && driver == 0) return "no NVIDIA driver is installed";
  return fmt::format("cudaGetDeviceCount: {}: {}", cudaGetErrorName(status), cudaGetErrorString(status));
}
}  // namespace

std::string unavailable_reason() {
  int count = 0;
  const cudaError_t status = cudaGetDeviceCount(&count);
  if (status != cudaSuccess) return why_uncounted(status);
  return count == 0 ? "the driver reports no device" : "";
}

int current_device() {
  int device = 0;
  GW_CUDA_CHECK(cudaGetDevice(&device));
  return device;
}

namespace {

// Returns an attribute of the current device; queried once per device.
int attribute_of_device(cudaDeviceAttr which) {
  static std::mutex mutex;
  static std::map<std::pair<int, cudaDeviceAttr>, int> known;
  const int device = current_device();
  std::lock_guard lock(mutex);
  int& value = known[{device, which}];
  if (value == 0) GW_CUDA_CHECK(cudaDeviceGetAttribute(&value, which, device));
  return value;
}

}  // namespace

int multiprocessors() {
  return attribute_of_device(cudaDevAttrMultiProcessorCount);
}

size_t max_shared_bytes() {
  return static_cast<size_t>(attribute_of_device(cudaDevAttrMaxSharedMemoryPerBlockOptin));
}

bool launches_early(const void* kernel) {
  static const bool wanted = environment_flag("GRADWIRE_EARLY_LAUNCH");
  if (!wanted || attribute_of_device(cudaDevAttrComputeCapabilityMajor) < 9) return false;
  // The code may have been compiled for an older GPU, where kernels do not wait. All kernels are compiled for
  // the same GPUs.
  static const bool waits = [&] {
    cudaFuncAttributes attributes;
    GW_CUDA_CHECK(cudaFuncGetAttributes(&attributes, kernel));
    return attributes.ptxVersion >= 90;
  }();
  return waits;
}

void allow_dynamic_shared(const char* name, const void* kernel, size_t bytes) {
  static std::mutex mutex;
  static std::map<std::pair<int, const void*>, size_t> allowed;
  const int device = current_device();
  std::lock_guard lock(mutex);
  size_t& most = allowed[{device, kernel}];
  if (bytes <= most) return;
  const cudaError_t status =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes));
  if (status != cudaSuccess) check(status, fmt::format("cudaFuncSetAttribute for '{}'", name).c_str());
  most = bytes;
}

int resident_blocks(const void* kernel, int threads, size_t shared_bytes) {
  static std::mutex mutex;
  static std::map<std::tuple<int, const void*, int, size_t>, int> known;
  const int device = current_device();
  if (shared_bytes > 0) allow_dynamic_shared("resident_blocks", kernel, shared_bytes);
  std::lock_guard lock(mutex);
  int& blocks = known[{device, kernel, threads, shared_bytes}];
  if (blocks == 0) {
    GW_CUDA_CHECK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, threads, shared_bytes));
    blocks = blocks > 0 ? blocks : 1;  // 0 means that the kernel does not fit; the launch reports the reason
  }
  return blocks;
}

std::shared_ptr<Stream::Impl> make_stream(int device_index, std::string name, Stream::Priority priority) {
  int count = 0;
  if (const cudaError_t status = cudaGetDeviceCount(&count); status != cudaSuccess)
    throw DeviceError("cuda:{} cannot be used: {}", device_index, why_uncounted(status));
  if (device_index < 0 || device_index >= count)
    throw DeviceError("cuda:{} does not exist: {} CUDA devices usable", device_index, count);
  set_device(device_index);
  CudaStream handle = nullptr;
  int least = 0, greatest = 0;
  GW_CUDA_CHECK(cudaDeviceGetStreamPriorityRange(&least, &greatest));
  GW_CUDA_CHECK(cudaStreamCreateWithPriority(&handle, cudaStreamNonBlocking,
                                             priority == Stream::Priority::high ? greatest : least));
  name_stream(handle, name);
  return std::make_shared<CudaStreamImpl>(device_index, std::move(name), handle, true, priority);
}

std::shared_ptr<Stream::Impl> adopt_stream(int device_index, CudaStream native) {
  return std::make_shared<CudaStreamImpl>(device_index, "adopted", native, false, Stream::Priority::normal);
}

std::shared_ptr<Event::Impl> make_event(int device_index, bool timer) {
  return std::make_shared<CudaEventImpl>(device_index, timer);
}

DeviceMemory device_memory(int device_index) {
  set_device(device_index);
  DeviceMemory memory;
  GW_CUDA_CHECK(cudaMemGetInfo(&memory.free, &memory.total));
  return memory;
}

namespace {
// Throws OutOfResources when an allocation on the current GPU is refused.
void check_allocation(cudaError_t status, const char* call, size_t bytes) {
  if (status == cudaSuccess) return;
  int device = -1;
  size_t free = 0, total = 0;
  ignore(cudaGetDevice(&device));
  ignore(cudaMemGetInfo(&free, &total));
  const std::string where = fmt::format("cuda:{} ({} of {} bytes free)", device, free, total);
  check(status, fmt::format("{} of {} bytes on {}", call, bytes, where).c_str());
}
}  // namespace

std::shared_ptr<void> allocate(int device_index, size_t bytes) {
  set_device(device_index);
  void* data = nullptr;
  check_allocation(cudaMalloc(&data, bytes), "cudaMalloc", bytes);
  return std::shared_ptr<void>(data, [](void* p) { ignore(cudaFree(p)); });
}

void switch_profiler(int device_index, bool on) {
  set_device(device_index);
  GW_CUDA_CHECK(on ? cudaProfilerStart() : cudaProfilerStop());
}

std::shared_ptr<void> allocate_pinned(size_t bytes) {
  void* data = nullptr;
  if (const cudaError_t status = cudaMallocHost(&data, bytes); status != cudaSuccess)
    check(status, fmt::format("cudaMallocHost of {} bytes", bytes).c_str());
  return std::shared_ptr<void>(data, [](void* p) { ignore(cudaFreeHost(p)); });
}

namespace {
// Returns the device's pool for memory in stream order. Unlike the default pool, this pool keeps released
// memory mapped across synchronizations, and lets other GPUs access the memory.
cudaMemPool_t pool_of(int device_index) {
  static std::mutex mutex;
  static std::map<int, cudaMemPool_t> pools;  // pools live until the process ends
  std::lock_guard lock(mutex);
  if (const auto known = pools.find(device_index); known != pools.end()) return known->second;
  cudaMemPoolProps properties{};
  properties.allocType = cudaMemAllocationTypePinned;
  properties.location = {cudaMemLocationTypeDevice, device_index};
  cudaMemPool_t pool = nullptr;
  GW_CUDA_CHECK(cudaMemPoolCreate(&pool, &properties));
  uint64_t all = std::numeric_limits<uint64_t>::max();
  GW_CUDA_CHECK(cudaMemPoolSetAttribute(pool, cudaMemPoolAttrReleaseThreshold, &all));
  for (int other = 0; other < device_count(); ++other) {
    int can = 0;
    if (other == device_index || cudaDeviceCanAccessPeer(&can, other, device_index) != cudaSuccess ||
        can == 0)
      continue;
    const cudaMemAccessDesc access{{cudaMemLocationTypeDevice, other}, cudaMemAccessFlagsProtReadWrite};
    ignore(cudaMemPoolSetAccess(pool, &access, 1));
  }
  return pools[device_index] = pool;
}
}  // namespace

std::shared_ptr<void> allocate_in_order(const std::shared_ptr<Stream::Impl>& stream, size_t bytes) {
  const int index = stream->device.index;
  set_device(index);
  int pools = 0;
  GW_CUDA_CHECK(cudaDeviceGetAttribute(&pools, cudaDevAttrMemoryPoolsSupported, index));
  void* data = nullptr;
  if (pools == 0) {  // true on vGPUs without unified memory
    check_allocation(cudaMalloc(&data, bytes), "cudaMalloc", bytes);
    return std::shared_ptr<void>(data, [stream](void* p) {
      ignore(cudaStreamSynchronize(stream->native()));
      ignore(cudaFree(p));
    });
  }
  check_allocation(cudaMallocFromPoolAsync(&data, bytes, pool_of(index), stream->native()),
                   "cudaMallocFromPoolAsync", bytes);
  return std::shared_ptr<void>(data, [stream](void* p) { ignore(cudaFreeAsync(p, stream->native())); });
}

void enable_peer_access(int device_index, int peer_index) {
  int can = 0;
  GW_CUDA_CHECK(cudaDeviceCanAccessPeer(&can, device_index, peer_index));
  if (can == 0) return;
  set_device(device_index);
  const cudaError_t status = cudaDeviceEnablePeerAccess(peer_index, 0);
  if (status == cudaErrorPeerAccessAlreadyEnabled) {
    cudaGetLastError();  // clear the sticky error
  } else {
    check(status, "cudaDeviceEnablePeerAccess");
  }
}

void copy(CudaStream stream, void* dst, const void* src, size_t bytes) {
  OpCount::launch("copy");
  GW_CUDA_CHECK(cudaMemcpyAsync(dst, src, bytes, cudaMemcpyDefault, stream));
}

void fill_zero(CudaStream stream, void* dst, size_t bytes) {
  OpCount::launch("fill_zero");
  GW_CUDA_CHECK(cudaMemsetAsync(dst, 0, bytes, stream));
}

// Begins a thread-local capture: calls that would break it are errors in this thread only. Other ranks,
// NCCL's monitoring threads and loaders in this process are not affected.
void begin_capture(int device_index, CudaStream origin) {
  set_device(device_index);
  GW_CUDA_CHECK(cudaStreamBeginCapture(origin, cudaStreamCaptureModeThreadLocal));
}

bool is_captured(int device_index, CudaStream stream) {
  set_device(device_index);
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  const cudaError_t result = cudaStreamIsCapturing(stream, &status);
  // CUDA returns this for the legacy default stream while another stream is captured.
  if (result == cudaErrorStreamCaptureImplicit) {
    cudaGetLastError();
    return true;
  }
  check(result, "cudaStreamIsCapturing");
  return status != cudaStreamCaptureStatusNone;
}

std::shared_ptr<void> end_capture(int device_index, CudaStream origin) {
  set_device(device_index);
  cudaGraph_t graph = nullptr;
  GW_CUDA_CHECK(cudaStreamEndCapture(origin, &graph));
  const std::unique_ptr<CUgraph_st, void (*)(cudaGraph_t)> owner(
      graph, [](cudaGraph_t g) { ignore(cudaGraphDestroy(g)); });
  cudaGraphExec_t executable = nullptr;
  GW_CUDA_CHECK(cudaGraphInstantiate(&executable, graph, 0));
  std::shared_ptr<void> result(
      executable, [](void* e) { ignore(cudaGraphExecDestroy(static_cast<cudaGraphExec_t>(e))); });
  GW_CUDA_CHECK(cudaGraphUpload(executable, origin));
  return result;
}

void drop_capture(int device_index, CudaStream origin) noexcept {
  cudaGraph_t graph = nullptr;
  if (cudaSetDevice(device_index) == cudaSuccess) cudaStreamEndCapture(origin, &graph);
  if (graph != nullptr) cudaGraphDestroy(graph);
  cudaGetLastError();  // the error is already known: the capture is broken
}

void launch_graph(int device_index, void* executable, CudaStream origin) {
  set_device(device_index);
  GW_CUDA_CHECK(cudaGraphLaunch(static_cast<cudaGraphExec_t>(executable), origin));
}

}  // namespace gradwire::cuda
