// The pretended machine behind the stand-in for the CUDA runtime API: the state that its parts share.
//   machine.cpp   devices, the current device, properties, peer access
//   errors.cpp    the last error, sticky errors, the call that fails on purpose
//   memory.cpp    allocations, copies, fills; device memory that the host may not touch
//   streams.cpp   streams and events
//   order.cpp     which stream's work runs next, and when
//   hold.cpp      streams that a test stops
//   graphs.cpp    stream capture and graphs
//   launches.cpp  limits of launches, attributes of functions
//   grids.cpp     runs a grid on tests/simt's fibers
//
// Calls enqueue work; threads of the stand-in run it later, one operation at a time. One mutex guards
// everything but the running operation.
#pragma once

#include <cuda_runtime_api.h>

#include <array>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <span>
#include <string>
#include <thread>
#include <vector>

namespace gradwire::standin {

using Clock = std::chrono::steady_clock;

// A point in a stream that can be waited for.
struct Ticket {
  bool done = false;
  Clock::time_point time{};
  CUstream_st* stream = nullptr;  // valid until done
};

struct EventState;

struct Op {
  enum class Kind { work, record, wait } kind = Kind::work;
  std::string name;
  std::function<void()> run;          // work
  std::shared_ptr<Ticket> ticket;     // record: to be marked; wait: to be waited for
  std::shared_ptr<EventState> event;  // record inside a graph: its ticket is renewed at each launch
  uint32_t devices = 0;               // bit d: may touch memory of device d
  uint64_t number = 0;                // of all operations, in the order in which they were enqueued
};

// An operation of a graph and the operations that precede it.
struct Node {
  Op op;
  std::vector<const Node*> after;
};

struct Capture {
  unsigned long long id = 0;
  CUstream_st* origin = nullptr;
  cudaStreamCaptureMode mode = cudaStreamCaptureModeGlobal;
  std::thread::id thread;
  bool invalid = false;
  std::vector<std::shared_ptr<Node>> nodes;
  std::vector<CUstream_st*> streams;  // origin, and those that joined
};

struct EventState {
  int device = 0;
  bool timing = true;
  std::shared_ptr<Ticket> ticket;     // of the last record outside a capture; null: never recorded
  std::shared_ptr<Capture> capture;   // of the last record, if inside one
  std::vector<const Node*> captured;  // what the event stands for in that capture
};

struct Worker;

}  // namespace gradwire::standin

struct CUstream_st {
  int device = 0;
  int number = 0;
  int connection = -1;  // the hardware queue of its device (order.cpp); -1: its own
  bool destroyed = false;
  std::deque<gradwire::standin::Op> queue;       // its first entry stays while it runs
  bool busy = false;                             // the first entry is running
  gradwire::standin::Worker* waiting = nullptr;  // the thread whose kernel waits for another kernel
  std::shared_ptr<gradwire::standin::Capture> capture;
  std::vector<const gradwire::standin::Node*> tail;  // capture: the stream's last operations
};
struct CUevent_st {
  std::shared_ptr<gradwire::standin::EventState> state;
};
struct CUgraph_st {
  std::vector<std::shared_ptr<gradwire::standin::Node>> nodes;
};
struct CUgraphExec_st {
  std::vector<std::shared_ptr<gradwire::standin::Node>> nodes;
};

namespace gradwire::standin {

constexpr int kMostDevices = 16;
constexpr int kMostConnections = 32;
constexpr size_t kDeviceBytes = size_t{8} << 30;
constexpr size_t kMostSharedBytes = 163 * 1024;  // of a block of sm_80
constexpr size_t kSharedWithoutAsking = 48 * 1024;
constexpr int kWarp = 32;

struct Device {
  cudaError_t sticky = cudaSuccess;  // after a kernel failed: every later call returns it
  uint32_t peers = 0;                // bit d: peer access to device d is enabled
  std::unique_ptr<CUstream_st> default_stream;
  size_t used_bytes = 0;
  std::array<int, kMostConnections> streams_of_connection = {};
  int frees_waiting = 0;  // cudaFree calls that wait for kernels; nothing can be launched meanwhile
};

struct Machine {
  std::mutex mutex;
  std::vector<Device> devices;
  std::vector<std::unique_ptr<CUstream_st>> streams;
  std::set<cudaEvent_t> events;
  std::vector<std::shared_ptr<Capture>> captures;
  std::map<std::pair<int, const void*>, size_t> allowed_shared;
  std::mt19937_64 random;
  int connections = 8;  // hardware queues of a device: CUDA_DEVICE_MAX_CONNECTIONS
  int streams_made = 0;
  uint64_t ops_made = 0;
  unsigned long long captures_made = 0;
};
Machine& machine();  // never destroyed: threads end after static objects
using Lock = std::unique_lock<std::mutex>;

// --- errors.cpp ---

// Counts a call of the API. Returns the error that it must fail with: a planted one, or the current device's
// sticky error.
cudaError_t begin_call(const char* name);
// Makes `status` the thread's last error, and returns it.
cudaError_t failed(cudaError_t status);
#define GW_STANDIN_CALL(name)                                                                     \
  if (const cudaError_t planted = ::gradwire::standin::begin_call(#name); planted != cudaSuccess) \
  return ::gradwire::standin::failed(planted)

// --- machine.cpp ---

int current_device();
// The devices whose memory kernels of `device` can touch: its own, and that of its enabled peers. Bit d:
// device d.
uint32_t reachable_from(int device);
// The stream object of a handle; null if there is none. The null handle is the current device's default
// stream.
CUstream_st* find_stream(cudaStream_t handle);
uint64_t number_from_environment(const char* name, uint64_t otherwise);

// --- order.cpp. The caller holds the mutex. ---

// Enqueues an operation, or records it if the stream is capturing.
cudaError_t enqueue(CUstream_st& stream, Op op);
std::shared_ptr<Ticket> enqueue_record(CUstream_st& stream);
// Blocks until the ticket is marked. Meanwhile streams run.
void wait_for(Lock& lock, const std::shared_ptr<Ticket>& ticket);
// Blocks until all work of a device that is enqueued now has ended.
void wait_for_device(Lock& lock, int device);
void mark(Ticket& ticket);
// Gives a new stream a hardware queue: the one with the fewest streams.
void connect(CUstream_st& stream);
// Drops streams that are destroyed and have no work left.
void drop_ended_streams();
// Blocks while a cudaFree of another thread waits for this device's kernels.
void wait_until_launches_may_begin(Lock& lock, int device);

// --- memory.cpp. The caller holds the mutex. ---

// Makes the memory of these devices accessible, and of no others. Bit d: device d.
void open_memory(uint32_t devices);
// Names the running operation in the message about a bad access.
void name_running_operation(const char* name);
// Ends the process if one of these is the address of pageable host memory, which a GPU cannot reach.
void refuse_host_memory(const char* name, std::span<const void* const> pointers);

// --- graphs.cpp. The caller holds the mutex. ---

// The error of a call that must not be made while the thread captures, such as cudaMalloc; it breaks the
// capture.
cudaError_t forbid_while_capturing();
cudaError_t record_in_capture(CUstream_st& stream, Op op);
cudaError_t record_event_in_capture(CUstream_st& stream, const std::shared_ptr<EventState>& event,
                                    bool external);
cudaError_t wait_in_capture(CUstream_st& stream, EventState& event);

}  // namespace gradwire::standin
