// Buffer, and the operations on memory in stream order.
#include <sys/mman.h>

#include <array>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <type_traits>

#include "runtime/device/device.h"
#include "runtime/device/device_impl.h"
#include "runtime/device/graph.h"
#include "runtime/threads/thread.h"
#include "runtime/util/error.h"

namespace gradwire {
namespace {
// Large host buffers use huge pages where the system grants them: streaming is a third faster.
constexpr size_t kHugePage = size_t{2} << 20, kHugePageBytes = 4 * kHugePage;

std::shared_ptr<void> counted(std::shared_ptr<void> memory, Device device, size_t bytes) {
  const auto size = static_cast<int64_t>(bytes);
  void* const data = memory.get();
  count_memory(device, size);
  return {data, [memory = std::move(memory), device, size](void*) mutable {
            // This branch runs when a constructor that has enqueued work on the memory fails. (On CUDA,
            // cudaFree() waits for the work.)
            if (device.is_host() && std::uncaught_exceptions() > 0) {
              host::release_in_order(std::move(memory));
            }
            memory.reset();
            count_memory(device, -size);
          }};
}
}  // namespace

Buffer::Buffer(Device device, size_t bytes) : device_(device), bytes_(bytes) {
  if (bytes == 0) return;
  Capture::forbid("Buffer", fmt::format("{} bytes", bytes), "memory is allocated in set-up");
  if (device.is_host()) {
    const size_t alignment = bytes >= kHugePageBytes ? kHugePage : 256;
    void* data = std::aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment);
    if (data == nullptr) throw_no_memory(bytes);
#ifdef MADV_HUGEPAGE
    if (bytes >= kHugePageBytes) madvise(data, bytes, MADV_HUGEPAGE);  // a hint; refusal costs only speed
#endif
    owner_ = counted(std::shared_ptr<void>(data, std::free), device, bytes);
  } else {
    owner_ = counted(cuda::allocate(device.index, bytes), device, bytes);
  }
  data_ = owner_.get();
}

Buffer Buffer::in_order(const Stream& stream, size_t bytes) {
  if (stream.device().is_host()) {
    Buffer buffer(stream.device(), bytes);
    if (!buffer) return buffer;
    buffer.owner_ = std::shared_ptr<void>(buffer.data_, [memory = buffer.owner_, stream](void*) mutable {
      stream.impl_->submit([memory = std::move(memory)] {});
    });
    return buffer;
  }
  Buffer buffer = view(stream.device(), nullptr, bytes);
  if (bytes == 0) return buffer;
  Capture::forbid("Buffer::in_order", fmt::format("{} bytes", bytes), "memory is allocated in set-up");
  buffer.owner_ = counted(cuda::allocate_in_order(stream.impl_, bytes), stream.device(), bytes);
  buffer.data_ = buffer.owner_.get();
  return buffer;
}

Buffer Buffer::view(Device device, void* data, size_t bytes, std::shared_ptr<void> owner) {
  Buffer buffer;
  buffer.device_ = device;
  buffer.data_ = data;
  buffer.bytes_ = bytes;
  buffer.owner_ = std::move(owner);
  return buffer;
}

Buffer Buffer::pinned(Device device, size_t bytes) {
  if (bytes == 0 || device.is_host()) return Buffer(Device::host(), bytes);
  cuda::set_device(device.index);  // otherwise the next call creates a context on another GPU
  const auto memory = cuda::allocate_pinned(bytes);
  return view(Device::host(), memory.get(), bytes, memory);
}

namespace {
template <typename... Args>
void enqueue_on_cuda(const Stream& stream, void (*operation)(CudaStream, Args...),
                     std::type_identity_t<Args>... args) {
  detail::make_current(stream.device());
  operation(stream.native(), args...);
}
}  // namespace

void copy(const Stream& stream, void* dst, const void* src, size_t bytes) {
  if (bytes == 0) return;
  OpCount::op("copy");
  if (stream.device().is_host()) {
    stream.submit([=] { std::memcpy(dst, src, bytes); });
  } else {
    enqueue_on_cuda(stream, cuda::copy, dst, src, bytes);
  }
}

void fill_zero(const Stream& stream, void* dst, size_t bytes) {
  if (bytes == 0) return;
  OpCount::op("fill_zero");
  if (stream.device().is_host()) {
    stream.submit([=] { std::memset(dst, 0, bytes); });
  } else {
    enqueue_on_cuda(stream, cuda::fill_zero, dst, bytes);
  }
}

void store(const Stream& stream, void* dst, const void* value, size_t bytes) {
  if (bytes == 0) return;
  OpCount::op("store");
  std::array<std::byte, 64> captured;
  Capture::forbid("store", "", "each launch would store the same value; call it in front of the launch");
  if (bytes > captured.size()) throw BadInput("store: {} bytes, at most 64 fit", bytes);
  std::memcpy(captured.data(), value, bytes);
  if (stream.device().is_host()) {
    stream.submit([=] { std::memcpy(dst, captured.data(), bytes); });
  } else {
    enqueue_on_cuda(stream, cuda::store, dst, captured.data(), bytes);
  }
}

void increment(const Stream& stream, uint64_t* counter) {
  OpCount::op("increment");
  if (stream.device().is_host()) {
    stream.submit([=] { ++*counter; });
  } else {
    enqueue_on_cuda(stream, cuda::increment, counter);
  }
}

}  // namespace gradwire
