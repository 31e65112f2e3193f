// Device, Stream, Event, Buffer: one vocabulary for CUDA and host, so that everything above is written once.
//
// A host Stream is an in-order queue run by a thread of its own. Ordering between two host streams exists
// only where an Event says so, exactly as on a GPU, so ThreadSanitizer sees a missing wait as a data race.
//
// All four are small values: copying one copies a handle. A Buffer's memory lives until its last handle is
// gone; work in flight does not keep it alive, so synchronize before dropping the last handle (as
// with CUDA). Only memory that is dropped by an exception, as in a constructor that has enqueued work and
// then fails, lives until the host streams have passed this point.
//
// Errors: a task that throws puts its host stream into a failed state; later tasks of that stream, and of
// streams that wait for its events, are skipped, and synchronize() rethrows the first error. A CUDA call that
// fails throws DeviceError.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

struct CUstream_st;

namespace gradwire {

using CudaStream = CUstream_st*;  // cudaStream_t, without the CUDA headers

struct Device {
  enum class Kind : uint8_t { host, cuda };
  Kind kind = Kind::host;
  int index = 0;

  static Device host() { return {Kind::host, 0}; }
  static Device cuda(int index) { return {Kind::cuda, index}; }
  bool is_host() const { return kind == Kind::host; }
  bool is_cuda() const { return kind == Kind::cuda; }
  std::string name() const;  // "host" or "cuda:0"
  bool operator==(const Device&) const = default;
};

// True when this binary holds the CUDA side (nvcc was there when it was built).
bool built_with_cuda();
// Number of CUDA devices usable now; 0 without a driver or without the CUDA side. Never throws.
int cuda_device_count();
// Whether kernels on `from` can read and write memory of `to`; for two GPUs that can, makes it so.
bool can_access(Device from, Device to);
// Why cuda_device_count() is 0, in a few words, for messages.
std::string cuda_unavailable_reason();
// Every device this process can compute on: the host first, then each CUDA device. Tests are typed over it.
std::vector<Device> available_devices();

class Event;

class Stream {
 public:
  Stream() = default;  // empty; using it is a programming error

  // On a GPU, blocks of kernels on a high-priority stream start before waiting blocks of others: for the kernels of an
  // exchange, which peers wait for. On the host the stream's thread runs soon after it wakes up (short_slices.h).
  enum class Priority : uint8_t { normal, high };

  // A new stream. `name` labels it in traces and in error texts.
  static Stream create(Device device, std::string_view name, Priority priority = Priority::normal);
  // Adopts a stream of the caller's: `native` is a cudaStream_t (may be null: the legacy default stream).
  static Stream adopt_cuda(int device_index, CudaStream native);
  // A host stream without a thread: each task runs in the caller, at once. For callers that have no streams.
  static Stream immediate_host();

  Device device() const;
  const std::string& name() const;
  Priority priority() const;
  explicit operator bool() const { return impl_ != nullptr; }
  bool operator==(const Stream& other) const { return impl_ == other.impl_; }  // the same queue

  // Host only: runs `task` on the stream's thread after everything submitted before it.
  void submit(std::function<void()> task) const;
  // Later work of this stream starts after what `event` recorded last. No-op if it never recorded.
  void wait(const Event& event) const;
  // Blocks the caller until all work submitted so far is done; throws the stream's first error.
  void synchronize() const;
  // Whether its work is now being captured in a CUDA graph, by whoever owns the stream.
  bool is_captured() const;
  // CUDA only: the cudaStream_t; the device is made current by ops themselves.
  CudaStream native() const;

  struct Impl;

 private:
  friend class Buffer;
  friend class Event;
  friend class Graph;
  explicit Stream(std::shared_ptr<Impl> impl) : impl_(std::move(impl)) {}
  std::shared_ptr<Impl> impl_;
};

class Event {
 public:
  Event() = default;
  // For the order of streams: has no time, which makes it cheaper on a GPU.
  static Event create(Device device);
  // An event for elapsed_ms(): a graph that holds its record() marks it again at each launch. Inside a graph
  // no stream can wait for it, and the marks of all other events are invisible outside it (graph.h).
  static Event create_timer(Device device);

  // Marks the point that `stream` has reached. Recording again moves it; earlier waits keep the old one.
  void record(const Stream& stream);
  // True once the recorded work is done; true if never recorded.
  bool query() const;
  // Blocks the caller until the recorded work is done; throws what the stream had failed with.
  void synchronize() const;
  // The same, but not for longer than until `deadline`: false when the work is still in flight then.
  bool synchronize_until(std::chrono::steady_clock::time_point deadline) const;
  explicit operator bool() const { return impl_ != nullptr; }

  struct Impl;

 private:
  friend class Stream;
  friend double elapsed_ms(const Event& start, const Event& end);
  static Event make(Device device, bool timer);
  static void outside(const Impl& event, const char* what);
  std::shared_ptr<Impl> impl_;
};

namespace detail {
// Makes a CUDA device current for this thread; does nothing for the host.
void make_current(Device device);

// For entry points of the library: the thread's current CUDA device is the caller's again at the end of the scope. Calls
// nothing of CUDA unless something in the scope has changed it.
class CallersDevice {
 public:
  CallersDevice();
  ~CallersDevice();
  CallersDevice(const CallersDevice&) = delete;
  CallersDevice& operator=(const CallersDevice&) = delete;
  // Called before a device becomes current.
  static void will_change_to(int index);

 private:
  CallersDevice* const outer_;
  int before_ = -1;  // the caller's, once another one has become current
};
}  // namespace detail

// Milliseconds between the two marks of timers, both of which must be done.
double elapsed_ms(const Event& start, const Event& end);

// Uninitialized memory on a device, 256-byte aligned. Allocation is for set-up, never for the step.
class Buffer {
 public:
  Buffer() = default;
  Buffer(Device device, size_t bytes);
  // A span of memory owned by somebody else, who keeps it alive or, if given, is kept alive by it.
  static Buffer view(Device device, void* data, size_t bytes, std::shared_ptr<void> owner = nullptr);
  // Host memory for copies to and from `device`: page-locked for a CUDA device, so that they can overlap.
  static Buffer pinned(Device device, size_t bytes);
  // Memory that `stream` may use from here on, and that is released when `stream` has passed the point where the last
  // handle is dropped: neither waits for the device, so this may be used in a step. Another stream must wait for an
  // event of `stream` before it uses the memory, and `stream` for one of the other before it is dropped.
  static Buffer in_order(const Stream& stream, size_t bytes);

  Device device() const { return device_; }
  size_t bytes() const { return bytes_; }
  void* data() const { return data_; }
  template <typename T>
  T* as() const {
    return static_cast<T*>(data_);
  }
  explicit operator bool() const { return data_ != nullptr; }

 private:
  Device device_;
  size_t bytes_ = 0;
  void* data_ = nullptr;
  std::shared_ptr<void> owner_;
};

// Lets each of the CUDA devices read the memory of every other one directly, where the hardware can; copies between
// the others go through the host. Does nothing for the host.
void enable_peer_access(const std::vector<Device>& devices);
// Whether a CUDA device reaches all visible others whose memory it can access over NVLink, not over PCIe. False for the host.
bool reaches_peers_over_nvlink(Device device);

template <typename T>
Buffer make_buffer(Device device, int64_t count) {
  return Buffer(device, static_cast<size_t>(count) * sizeof(T));
}

// Copies in stream order. Host pointers used with a CUDA stream should be pinned; either way `src` and `dst`
// must stay valid until the stream has passed this point. Directions are found from the addresses.
void copy(const Stream& stream, void* dst, const void* src, size_t bytes);
void fill_zero(const Stream& stream, void* dst, size_t bytes);
// Stores up to 64 bytes, captured by value now: how a host scalar reaches device memory in stream order.
void store(const Stream& stream, void* dst, const void* value, size_t bytes);
// Adds 1 to a counter in device memory, in stream order (counters that decide anything live on the device).
void increment(const Stream& stream, uint64_t* counter);

// Synchronous helpers for set-up and tests: copy, then synchronize the stream.
template <typename T>
std::vector<T> to_host(const Stream& stream, const T* device_data, int64_t count) {
  std::vector<T> out(static_cast<size_t>(count));
  copy(stream, out.data(), device_data, out.size() * sizeof(T));
  stream.synchronize();
  return out;
}
template <typename T>
void to_device(const Stream& stream, T* device_data, std::span<const T> values) {
  copy(stream, device_data, values.data(), values.size_bytes());
  stream.synchronize();
}

}  // namespace gradwire
