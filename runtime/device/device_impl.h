// The interface of a device to Stream, Event and Buffer. The interface is implemented in host_stream.cpp and
// device_cuda.cpp. In builds without CUDA, cuda_absent.cpp implements namespace cuda by functions that throw.
#pragma once

#include <memory>
#include <string>
#include <utility>

#include "runtime/device/device.h"

namespace gradwire {

struct Stream::Impl : std::enable_shared_from_this<Stream::Impl> {
  Impl(Device device, std::string name, Priority priority)
      : device(device), name(std::move(name)), priority(priority) {}
  virtual ~Impl() = default;
  virtual void submit(std::function<void()> task) = 0;
  virtual void wait(const Event::Impl& event) = 0;
  virtual void synchronize() = 0;
  virtual CudaStream native() const = 0;

  const Device device;
  const std::string name;
  const Priority priority;
};

struct Event::Impl : std::enable_shared_from_this<Event::Impl> {
  Impl(Device device, bool timer) : device(device), timer(timer) {}
  virtual ~Impl() = default;
  virtual void record(Stream::Impl& stream) = 0;
  virtual bool query() const = 0;
  virtual void synchronize() const = 0;
  virtual bool synchronize_until(std::chrono::steady_clock::time_point deadline) const;
  virtual double ms_since(const Impl& start) const = 0;

  const Device device;
  const bool timer;
  // The last graph capture that recorded the event; 0: recorded outside a graph, or never.
  uint64_t capture = 0;
};

namespace host {
std::shared_ptr<Stream::Impl> make_stream(std::string name, Stream::Priority priority);
std::shared_ptr<Stream::Impl> make_immediate_stream();
std::shared_ptr<Event::Impl> make_event(bool timer);
// Releases `memory` once every host stream has passed this point. Does not wait.
void release_in_order(std::shared_ptr<void> memory) noexcept;
}  // namespace host

namespace cuda {
std::shared_ptr<Stream::Impl> make_stream(int device_index, std::string name, Stream::Priority priority);
std::shared_ptr<Stream::Impl> adopt_stream(int device_index, CudaStream native);
std::shared_ptr<Event::Impl> make_event(int device_index, bool timer);
// Begin a stream capture, then end or abort it. A launch enqueues the graph on the stream of the capture.
void begin_capture(int device_index, CudaStream origin);
std::shared_ptr<void> end_capture(int device_index, CudaStream origin);  // returns an executable graph
void drop_capture(int device_index, CudaStream origin) noexcept;
bool is_captured(int device_index, CudaStream stream);
void launch_graph(int device_index, void* executable, CudaStream origin);
std::shared_ptr<void> allocate(int device_index, size_t bytes);
std::shared_ptr<void> allocate_pinned(size_t bytes);
std::shared_ptr<void> allocate_in_order(const std::shared_ptr<Stream::Impl>& stream, size_t bytes);
// Does nothing if the device cannot access the peer's memory.
void enable_peer_access(int device_index, int peer_index);
void copy(CudaStream stream, void* dst, const void* src, size_t bytes);
void fill_zero(CudaStream stream, void* dst, size_t bytes);
void store(CudaStream stream, void* dst, const void* value, size_t bytes);
void increment(CudaStream stream, uint64_t* counter);
void set_device(int device_index);
// Makes a device current again in a caller's thread. Does nothing if the device does not have a context,
// because setting the device would create a context of hundreds of megabytes.
void restore_device(int device_index) noexcept;
int current_device();
int multiprocessors();  // returns the number of multiprocessors of the current device
int device_count();
DeviceMemory device_memory(int device_index);
void switch_profiler(int device_index, bool on);
std::string unavailable_reason();
}  // namespace cuda

}  // namespace gradwire
