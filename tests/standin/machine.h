// The pretended machine behind the stand-in for the CUDA runtime API: the state shared by all its parts.
//   machine.cpp   devices, the current device, properties, peer access
//   errors.cpp    the last error, sticky errors, the call that fails on purpose
//   memory.cpp    allocations, copies, fills; device memory that the host must not access
//   streams.cpp   streams and events
//   order.cpp     which stream's work runs next, and when
//   hold.cpp      streams that a test stops
//   graphs.cpp    stream capture and graphs
//   launches.cpp  limits of launches, attributes of functions
//   grids.cpp     runs a grid on tests/simt's fibers
//
// API calls enqueue operations. Threads of the stand-in run the operations later, one at a time. One mutex
// guards all state except the running operation's.
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

// Marks a point in a stream, for which other streams and host threads can wait.
struct Ticket {
  bool done = false;
  Clock::time_point time{};
  CUstream_st* stream = nullptr;  // valid until the ticket is done
};

struct EventState;

struct Op {
  enum class Kind { work, record, wait } kind = Kind::work;
  std::string name;
  std::function<void()> run;          // the work of a work operation
  std::shared_ptr<Ticket> ticket;     // record: the ticket to mark; wait: the ticket to wait for
  std::shared_ptr<EventState> event;  // record in a graph: the event, which gets a new ticket at each launch
  uint32_t devices = 0;               // bit d: the operation may access memory of device d
  uint64_t number = 0;                // sequence number among all enqueued operations
};

// Holds an operation of a graph and the operations that precede it.
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
  std::vector<CUstream_st*> streams;  // the origin stream, and the streams that joined the capture
};

struct EventState {
  int device = 0;
  bool timing = true;
  std::shared_ptr<Ticket> ticket;     // ticket of the last record outside a capture; null: no record
  std::shared_ptr<Capture> capture;   // capture of the last record; null: recorded outside a capture
  std::vector<const Node*> captured;  // operations in that capture that precede the event
};

struct Worker;

}  // namespace gradwire::standin

struct CUstream_st {
  int device = 0;
  int number = 0;
  int connection = -1;  // index of the device's hardware queue (order.cpp); -1: a queue of its own
  bool destroyed = false;
  std::deque<gradwire::standin::Op> queue;       // a running entry stays at the front
  bool busy = false;                             // the first entry is running
  gradwire::standin::Worker* waiting = nullptr;  // thread whose kernel waits for another kernel
  std::shared_ptr<gradwire::standin::Capture> capture;
  std::vector<const gradwire::standin::Node*> tail;  // the stream's last operations in a capture
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

constexpr int kMaxDevices = 16;
constexpr int kMaxConnections = 32;
constexpr size_t kDeviceBytes = size_t{8} << 30;
constexpr size_t kMaxSharedBytes = 163 * 1024;  // limit per block on sm_80
constexpr size_t kSharedWithoutAsking = 48 * 1024;
constexpr int kWarp = 32;

struct Device {
  cudaError_t sticky = cudaSuccess;  // error that every call returns after a kernel has failed
  uint32_t peers = 0;                // bit d: peer access to device d is enabled
  std::unique_ptr<CUstream_st> default_stream;
  size_t used_bytes = 0;
  std::array<int, kMaxConnections> streams_of_connection = {};
  int frees_waiting = 0;  // number of cudaFree calls that wait for kernels; launches wait for these calls
};

struct Machine {
  std::mutex mutex;
  std::vector<Device> devices;
  std::vector<std::unique_ptr<CUstream_st>> streams;
  std::set<cudaEvent_t> events;
  std::vector<std::shared_ptr<Capture>> captures;
  std::map<std::pair<int, const void*>, size_t> allowed_shared;
  std::mt19937_64 random;
  int connections = 8;  // hardware queues per device: CUDA_DEVICE_MAX_CONNECTIONS
  int streams_made = 0;
  uint64_t ops_made = 0;
  unsigned long long captures_made = 0;
};
// Returns the machine, which is never destroyed because threads end after static objects.
Machine& machine();
using Lock = std::unique_lock<std::mutex>;

// --- errors.cpp ---

// Counts an API call. Returns the error with which the call must fail: a planted error, or the current
// device's sticky error.
cudaError_t begin_call(const char* name);
// Sets the thread's last error to `status`. Returns `status`.
cudaError_t failed(cudaError_t status);
#define GW_STANDIN_CALL(name)                                                                     \
  if (const cudaError_t planted = ::gradwire::standin::begin_call(#name); planted != cudaSuccess) \
  return ::gradwire::standin::failed(planted)

// --- machine.cpp ---

int current_device();
// Returns the devices whose memory kernels on `device` can access: `device` and its enabled peers. Bit d is
// device d.
uint32_t reachable_from(int device);
// Returns the stream object of a handle, or null if no such stream exists. The null handle is the current
// device's default stream.
CUstream_st* find_stream(cudaStream_t handle);
uint64_t number_from_environment(const char* name, uint64_t otherwise);

// --- order.cpp. The caller holds the mutex. ---

// Enqueues an operation, or records it if the stream is capturing.
cudaError_t enqueue(CUstream_st& stream, Op op);
std::shared_ptr<Ticket> enqueue_record(CUstream_st& stream);
// Blocks until the ticket is marked. Streams run in the meantime.
void wait_for(Lock& lock, const std::shared_ptr<Ticket>& ticket);
// Blocks until all work that is enqueued on a device at the call has ended.
void wait_for_device(Lock& lock, int device);
void mark(Ticket& ticket);
// Assigns the hardware queue with the fewest streams to a new stream.
void connect(CUstream_st& stream);
// Deletes destroyed streams that have no work left.
void drop_ended_streams();
// Blocks while another thread's cudaFree waits for this device's kernels.
void wait_until_launches_may_begin(Lock& lock, int device);

// --- memory.cpp. The caller holds the mutex. ---

// Makes the memory of these devices accessible and the memory of all other devices inaccessible. Bit d is
// device d.
void open_memory(uint32_t devices);
// Sets the operation's name for the message about an invalid access.
void name_running_operation(const char* name);
// Ends the process if a pointer refers to pageable host memory, which a GPU cannot access.
void refuse_host_memory(const char* name, std::span<const void* const> pointers);

// --- graphs.cpp. The caller holds the mutex. ---

// Returns the error of a call, such as cudaMalloc, that is forbidden while the thread captures. Such a call
// invalidates the capture.
cudaError_t forbid_while_capturing();
cudaError_t record_in_capture(CUstream_st& stream, Op op);
cudaError_t record_event_in_capture(CUstream_st& stream, const std::shared_ptr<EventState>& event,
                                    bool external);
cudaError_t wait_in_capture(CUstream_st& stream, EventState& event);

}  // namespace gradwire::standin
