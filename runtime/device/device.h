// Device, Stream, Event, Buffer: one interface to CUDA and host, so that all code above is written once.
//
// A host Stream is an in-order queue with a separate thread. Two host streams are ordered only by an Event,
// exactly as on a GPU, so ThreadSanitizer reports a missing wait as a data race.
//
// Objects of the four classes are small values: copying an object copies a handle. A Buffer's memory lives
// until its last handle is dropped. Work in flight does not keep the memory alive, so synchronize before
// dropping the last handle (as with CUDA). Exception: memory dropped by an exception, as in a constructor
// that has enqueued work and then fails, lives until the host streams have passed this point.
//
// Errors: a task that throws puts its host stream into a failed state. Later tasks of that stream, and of
// streams that wait for its events, are skipped, and synchronize() rethrows the first error. A CUDA call that
// fails throws DeviceError.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <iterator>
#include <map>
#include <memory>
#include <optional>
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

// Returns whether this binary has the CUDA side (nvcc was present when it was built).
bool built_with_cuda();
// Returns the number of usable CUDA devices; 0 without a driver or without the CUDA side. Never throws.
int cuda_device_count();
// Lets kernels and copies on `from` access memory of `to` directly, where the hardware supports it. Elsewhere
// copies go through the host.
void enable_access(Device from, Device to);
// Returns a short reason why cuda_device_count() is 0, for messages.
std::string cuda_unavailable_reason();
// Returns all devices that this process can compute on: the host first, then each CUDA device. Tests are
// typed over the list.
std::vector<Device> available_devices();

class Event;

class Stream {
 public:
  Stream() = default;  // an empty handle, which must not be used

  // The stream's priority. On a GPU, kernel blocks of a high-priority stream start before waiting blocks of
  // other streams; meant for the kernels of an exchange, because peers wait for them. On the host, the thread
  // of a high-priority stream runs soon after it wakes up.
  enum class Priority : uint8_t { normal, high };

  // Creates a stream. `name` labels it in traces and in error texts.
  static Stream create(Device device, std::string_view name, Priority priority = Priority::normal);
  // Adopts the caller's stream: `native` is a cudaStream_t (null: the legacy default stream).
  static Stream adopt_cuda(int device_index, CudaStream native);
  // Returns a host stream without a thread: submit() runs each task at once in the calling thread. Meant for
  // callers without streams.
  static Stream immediate_host();

  Device device() const;
  const std::string& name() const;
  Priority priority() const;
  explicit operator bool() const { return impl_ != nullptr; }
  // Returns whether both streams are handles of the same queue.
  bool operator==(const Stream& other) const { return impl_ == other.impl_; }

  // Runs `task` on the stream's thread after all earlier tasks. Host only.
  void submit(std::function<void()> task) const;
  // Delays later work of this stream until `event`'s last record is complete. Does nothing if the event was
  // never recorded.
  void wait(const Event& event) const;
  // Blocks until all work submitted so far is complete. Throws the stream's first error.
  void synchronize() const;
  // Returns whether the owner of the stream is capturing its work in a CUDA graph.
  bool is_captured() const;
  // Returns the cudaStream_t. CUDA only. Ops make the device current before they use the stream.
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
  // Creates an event that orders streams. It records no time, which makes it cheaper on a GPU.
  static Event create(Device device);
  // Creates an event for elapsed_ms(). A graph that contains its record() marks the timer again at each
  // launch. Inside a graph no stream can wait for a timer, and only timers have marks that are visible
  // outside the graph (graph.h).
  static Event create_timer(Device device);

  // Marks the point that `stream` has reached. Recording again moves the mark; earlier waits keep the old
  // mark.
  void record(const Stream& stream);
  // Returns whether the recorded work is complete; true if the event was never recorded.
  bool query() const;
  // Blocks until the recorded work is complete. Throws the recording stream's error.
  void synchronize() const;
  // Blocks until the recorded work is complete or until `deadline`. Returns false if the work is still in
  // flight at the deadline. Throws the recording stream's error.
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

// Restores the caller's current CUDA device at the end of the scope. Used by entry points of the library.
// Calls CUDA only if the scope has changed the device.
class CallersDevice {
 public:
  CallersDevice();
  ~CallersDevice();
  CallersDevice(const CallersDevice&) = delete;
  CallersDevice& operator=(const CallersDevice&) = delete;
  // Notes the caller's device; called before another device becomes current.
  static void will_change_to(int index);

 private:
  CallersDevice* const outer_;
  int before_ = -1;  // the caller's device, once another device is current
};
}  // namespace detail

// Returns the milliseconds between the marks of two timers, both of which must be complete.
double elapsed_ms(const Event& start, const Event& end);

// Waits for a stream when an exception leaves the scope, because enqueued work may use objects of the scope.
// Declare it after these objects.
class FinishOnError {
 public:
  explicit FinishOnError(const Stream& stream) : stream_(stream) {}
  ~FinishOnError() {
    if (std::uncaught_exceptions() == before_) return;
    try {
      stream_.synchronize();
    } catch (...) {  // the exception that leaves the scope is reported
    }
  }
  FinishOnError(const FinishOnError&) = delete;

 private:
  const Stream& stream_;
  const int before_ = std::uncaught_exceptions();
};

// Uninitialized memory on a device, 256-byte aligned. Allocate in set-up, never in a step.
class Buffer {
 public:
  Buffer() = default;
  Buffer(Device device, size_t bytes);
  // Returns a view of memory owned by the caller or, if `owner` is given, kept alive by `owner`.
  static Buffer view(Device device, void* data, size_t bytes, std::shared_ptr<void> owner = nullptr);
  // Allocates host memory for copies to and from `device`: page-locked for a CUDA device, so that copies
  // overlap.
  static Buffer pinned(Device device, size_t bytes);
  // Allocates memory that later work of `stream` may use. The memory is released when `stream` has passed the
  // point where the last handle is dropped. Neither allocation nor release waits for the device, so
  // in_order() may be used in a step. Another stream must wait for an event of `stream` before it uses the
  // memory, and `stream` must wait for an event of the other stream before the last handle is dropped.
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

template <typename T>
Buffer make_buffer(Device device, int64_t count) {
  return Buffer(device, static_cast<size_t>(count) * sizeof(T));
}

// Copies memory in stream order. Host pointers used with a CUDA stream should be pinned; in any case `src`
// and `dst` must stay valid until the stream has passed this point. The addresses determine the direction.
void copy(const Stream& stream, void* dst, const void* src, size_t bytes);
void fill_zero(const Stream& stream, void* dst, size_t bytes);
// Stores up to 64 bytes in device memory, in stream order. The bytes of `value` are copied during the call.
void store(const Stream& stream, void* dst, const void* value, size_t bytes);
// Adds 1 to a counter in device memory, in stream order (counters that affect results are on the device).
void increment(const Stream& stream, uint64_t* counter);

// Copy, then synchronize the stream: helpers for set-up and tests.
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

// Number types in memory and in files.

enum class DType : uint8_t { f64, f32, f16, bf16, i64, i32, i16, i8, u8 };

namespace detail {
struct DTypeFacts {
  const char* name;
  int64_t bytes;
};
inline constexpr DTypeFacts kDTypes[] = {{"F64", 8}, {"F32", 4}, {"F16", 2}, {"BF16", 2}, {"I64", 8},
                                         {"I32", 4}, {"I16", 2}, {"I8", 1},  {"U8", 1}};
}  // namespace detail

// Returns the type's name in safetensors files.
constexpr const char* name(DType dtype) {
  return detail::kDTypes[static_cast<size_t>(dtype)].name;
}
constexpr int64_t bytes_of(DType dtype) {
  return detail::kDTypes[static_cast<size_t>(dtype)].bytes;
}
constexpr std::optional<DType> find_dtype(std::string_view text) {
  for (size_t i = 0; i < std::size(detail::kDTypes); ++i) {
    if (text == detail::kDTypes[i].name) return static_cast<DType>(i);
  }
  return {};
}

// Properties of devices.

// Memory of a CUDA device, or of its partition (MIG), in bytes.
struct DeviceMemory {
  size_t free = 0, total = 0;
};
// Creates the device's context if the process has none.
DeviceMemory device_memory(Device device);

// Counts the ops and launches that a section of code enqueues. The counts measure the cost of a step for the
// host, and for a small GPU.
//
//   OpCount count;            // counts in this thread until the end of the scope
//   Graph::capture(stream, [&] { step(); });    // or run it
//   count.ops(), count.launches()
//
// Ops are counted on every device where they are dispatched (kernels/op.h, copy(), store() and similar
// functions); launches are counted only on CUDA and in tests/simt.

class OpCount {
 public:
  using ByName = std::map<std::string, int64_t>;

  OpCount();
  ~OpCount();
  OpCount(const OpCount&) = delete;
  OpCount& operator=(const OpCount&) = delete;

  const ByName& ops() const { return ops_; }
  // Returns the number of launches by name: the kernel's name as passed to launch(), or "gemm" for cuBLAS
  // products.
  const ByName& launches() const { return launches_; }

  static int64_t total(const ByName& counts);

  // Count an op or a launch; called by dispatchers and launchers. Do nothing when no OpCount exists.
  static void op(const char* name);
  static void launch(const char* name);

 private:
  OpCount* outer_;  // the enclosing OpCount, which also counts
  ByName ops_, launches_;
};

// The memory that Buffers hold on each device.

struct MemoryUse {
  int64_t bytes = 0;  // allocated now, without views of other memory
  int64_t peak = 0;   // the maximum since the process began, or since reset_memory_peak()
};

MemoryUse memory_use(Device device);
void reset_memory_peak(Device device);
// Counts memory that a Buffer allocates; `bytes` is negative for memory that a Buffer releases.
void count_memory(Device device, int64_t bytes);

// Asks Linux (6.12 and later; earlier versions ignore the request) to run this thread in slices of 0.1 ms,
// the shortest possible. The thread has the same share of a core as other threads, but runs soon after it
// wakes up. Meant for threads that wait for a network while other threads compute. Needs no privileges; a
// failure has no effect.
void ask_for_short_slices();

}  // namespace gradwire
