// Which operation runs next, and when.
//
// Operations run one at a time, on threads of the stand-in. An operation starts late: when the host waits, or
// some milliseconds after the operation was enqueued. A stream is a candidate if its next operation waits for
// nothing. The choice among candidates alternates between three ways every few operations, because each way
// finds different missing waits:
//   demanded  only operations that the waiting host needs; work without a wait has not run yet
//   any       any candidate
//   others    operations that the host does not wait for, which overtake work that should precede them
//
// A device has CUDA_DEVICE_MAX_CONNECTIONS hardware queues. If a device has more streams, some streams share
// a queue, which may create false dependencies between their operations (CUDA programming guide, section
// "CUDA environment variables"). The stand-in always creates these dependencies: an operation starts after
// all earlier operations of its queue have started. Event waits count as operations. So a kernel hangs if it
// waits for an operation that was enqueued after the next operation of the kernel's stream. This rule is
// stricter than measurements: 48 streams of an H200 shared no queue (docs/results/2026-11-26-gpu). Programs
// ordered by events cannot hang, because each event wait is for an operation that was enqueued earlier.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <exception>

#include "tests/standin/launch.h"
#include "tests/standin/machine.h"

namespace gradwire::standin {

struct Worker {
  std::condition_variable changed;
  bool chosen = false;
};

namespace {

enum class Way { demanded, any, others };

struct Order {
  std::condition_variable host_changed, timer_changed;
  std::vector<std::shared_ptr<Ticket>> demands;  // tickets for which host threads wait
  std::vector<Worker*> idle;
  bool running = false;  // a worker runs operations
  bool overdue = false;  // operations run although no thread waits for them
  bool timer_set = false, timer_runs = false;
  bool ended = false;  // the process is exiting: no operation starts, and no thread waits
  Clock::time_point due{};
  Way way = Way::any;
};
Order& order() {
  static auto* const only = new Order();
  return *only;
}

thread_local Worker* this_worker = nullptr;
thread_local CUstream_st* running_stream = nullptr;

template <typename Body>
void for_each_stream(const Body& body) {
  for (Device& d : machine().devices) body(*d.default_stream);
  for (const auto& stream : machine().streams) body(*stream);
}

// Returns the next operation that a stream starts, or null.
const Op* next_to_start(const CUstream_st& stream) {
  const size_t started = stream.busy ? 1 : 0;
  return stream.queue.size() > started ? &stream.queue[started] : nullptr;
}

// Returns the stream of the same hardware queue whose next operation was enqueued before this stream's next
// operation, or null.
CUstream_st* ahead_of(const CUstream_st& stream) {
  const Op* const mine = next_to_start(stream);
  if (stream.connection < 0 || mine == nullptr) return nullptr;
  const Device& device = machine().devices[stream.device];
  if (device.streams_of_connection[stream.connection] < 2) return nullptr;
  for (const auto& other : machine().streams) {
    if (other.get() == &stream || other->device != stream.device || other->connection != stream.connection)
      continue;
    const Op* const theirs = next_to_start(*other);
    if (theirs != nullptr && theirs->number < mine->number) return other.get();
  }
  return nullptr;
}

// Marks records and removes waits that are at the front of their streams.
void settle() {
  bool again = true;
  while (again) {
    again = false;
    for_each_stream([&](CUstream_st& stream) {
      while (!stream.queue.empty() && !stream.busy) {
        Op& op = stream.queue.front();
        if (op.kind == Op::Kind::work || (op.kind == Op::Kind::wait && !op.ticket->done)) break;
        if (ahead_of(stream) != nullptr) break;
        if (op.kind == Op::Kind::record) mark(*op.ticket);
        stream.queue.pop_front();
        again = true;
      }
    });
  }
  drop_ended_streams();
}

bool is_candidate(const CUstream_st& stream) {
  if (stream.busy) return stream.waiting != nullptr;
  return !stream.queue.empty() && stream.queue.front().kind == Op::Kind::work && ahead_of(stream) == nullptr;
}

// Returns the stream whose next operation a host thread needs, or null if that operation cannot run.
CUstream_st* demanded_stream() {
  for (const auto& demand : order().demands) {
    CUstream_st* stream = demand->stream;
    while (!demand->done && stream != nullptr && !stream->busy && !stream->queue.empty()) {
      CUstream_st* before = ahead_of(*stream);
      const Op& op = stream->queue.front();
      if (before == nullptr && op.kind == Op::Kind::wait) before = op.ticket->stream;
      if (before == nullptr) break;
      stream = before;
    }
    if (!demand->done && stream != nullptr && is_candidate(*stream)) return stream;
  }
  return nullptr;
}

// Returns the next stream to run, or null. A kernel that waits for another kernel yields to any other
// candidate half of the time, because the waiting kernel alone cannot finish.
CUstream_st* choose() {
  settle();
  if (order().ended) return nullptr;
  if (order().demands.empty() && !order().overdue) return nullptr;
  std::vector<CUstream_st*> candidates;
  bool all_wait = true;
  for_each_stream([&](CUstream_st& stream) {
    if (!is_candidate(stream)) return;
    candidates.push_back(&stream);
    all_wait = all_wait && stream.waiting != nullptr;
  });
  if (candidates.empty()) return nullptr;
  const uint64_t number = machine().random();
  if (number % 8 == 0) order().way = static_cast<Way>(number / 8 % 3);
  CUstream_st* const demanded = demanded_stream();
  const bool kernels_wait = std::ranges::any_of(candidates, [](auto* s) { return s->waiting != nullptr; });
  if (demanded != nullptr && !kernels_wait) {
    if (order().way == Way::demanded) return demanded;
    if (order().way == Way::others && candidates.size() > 1) std::erase(candidates, demanded);
  }
  if (kernels_wait && !all_wait && number / 32 % 2 == 0)
    std::erase_if(candidates, [](auto* s) { return s->waiting != nullptr; });
  return candidates[number / 64 % candidates.size()];
}

void run(Lock& lock, CUstream_st& stream) {
  Device& device = machine().devices[stream.device];
  Op& op = stream.queue.front();
  stream.busy = true;
  if (device.sticky == cudaSuccess) {
    open_memory(reachable_from(stream.device) | op.devices);
    name_running_operation(op.name.c_str());
    running_stream = &stream;
    lock.unlock();
    std::string failure;
    try {
      op.run();
    } catch (const std::exception& error) {
      failure = error.what();
    }
    lock.lock();
    running_stream = nullptr;
    if (!failure.empty()) {
      std::fprintf(stderr, "standin: cuda:%d: %s failed: %s\n", stream.device, op.name.c_str(),
                   failure.c_str());
      device.sticky = cudaErrorLaunchFailure;
    }
  }
  stream.busy = false;
  stream.queue.pop_front();
}

void let_run(Worker* worker);
void set_timer();

// Runs operations until no operation can run.
void run_operations(Lock& lock) {
  while (CUstream_st* const stream = choose()) {
    if (stream->waiting != nullptr) {
      Worker* const other = stream->waiting;
      order().idle.push_back(this_worker);
      let_run(other);
      return;
    }
    run(lock, *stream);
  }
  name_running_operation("");
  open_memory(0);
  order().running = order().overdue = false;
  order().idle.push_back(this_worker);
  order().host_changed.notify_all();
  set_timer();
}

void work() {
  Worker self;
  this_worker = &self;
  Lock lock(machine().mutex);
  self.chosen = true;  // a new worker runs immediately
  while (true) {
    self.changed.wait(lock, [&] { return self.chosen; });
    self.chosen = false;
    run_operations(lock);
  }
}

// Waits for the running operation before static objects, including the engine's, are destroyed.
void end_at_exit() {
  Lock lock(machine().mutex);
  order().ended = true;
  order().host_changed.notify_all();
  order().host_changed.wait(lock, [] { return !order().running; });
}

// Wakes `worker`, or any idle worker if null. The woken worker runs operations.
void let_run(Worker* worker) {
  if (worker == nullptr && order().idle.empty()) {
    [[maybe_unused]] static const int registered = std::atexit(end_at_exit);
    std::thread(work).detach();
    return;
  }
  if (worker == nullptr) {
    worker = order().idle.back();
    order().idle.pop_back();
  }
  worker->chosen = true;
  worker->changed.notify_one();
}

bool anything_enqueued() {
  bool any = false;
  for_each_stream([&](CUstream_st& stream) { any = any || !stream.queue.empty(); });
  return any;
}

// Runs operations that no thread waits for, some time after they were enqueued.
void watch_time() {
  Lock lock(machine().mutex);
  while (true) {
    order().timer_changed.wait(lock, [] { return order().timer_set; });
    while (Clock::now() < order().due) {
      const Clock::time_point until = order().due;
      order().timer_changed.wait_until(lock, until);
    }
    order().timer_set = false;
    order().overdue = true;
    if (order().running) continue;
    if (choose() == nullptr) {
      order().overdue = false;
      continue;
    }
    order().running = true;
    let_run(nullptr);
  }
}

void set_timer() {
  if (order().timer_set || !anything_enqueued()) return;
  order().timer_set = true;
  order().due = Clock::now() + std::chrono::microseconds(1000 + machine().random() % 4000);
  if (!order().timer_runs) {
    order().timer_runs = true;
    std::thread(watch_time).detach();
  }
  order().timer_changed.notify_one();
}

void push(CUstream_st& stream, Op op) {
  op.number = ++machine().ops_made;
  stream.queue.push_back(std::move(op));
}

// Starts running operations if operations may run now.
void begin_running() {
  if (order().running) return;
  if (choose() != nullptr) {
    order().running = true;
    return let_run(nullptr);
  }
  set_timer();
}

}  // namespace

void connect(CUstream_st& stream) {
  auto& streams = machine().devices[stream.device].streams_of_connection;
  const auto least = std::min_element(streams.begin(), streams.begin() + machine().connections);
  ++*least;
  stream.connection = static_cast<int>(least - streams.begin());
}

void drop_ended_streams() {
  std::erase_if(machine().streams, [](const auto& s) {
    if (!s->destroyed || !s->queue.empty() || s->busy) return false;
    --machine().devices[s->device].streams_of_connection[s->connection];
    return true;
  });
}

void mark(Ticket& ticket) {
  ticket.done = true;
  ticket.time = Clock::now();
  if (std::ranges::any_of(order().demands, [&](const auto& demand) { return demand.get() == &ticket; }))
    order().host_changed.notify_all();
}

cudaError_t enqueue(CUstream_st& stream, Op op) {
  if (stream.capture != nullptr) return record_in_capture(stream, std::move(op));
  push(stream, std::move(op));
  begin_running();
  return cudaSuccess;
}

std::shared_ptr<Ticket> enqueue_record(CUstream_st& stream) {
  auto ticket = std::make_shared<Ticket>();
  ticket->stream = &stream;
  push(stream, {.kind = Op::Kind::record, .name = "an event", .ticket = ticket});
  settle();
  begin_running();
  return ticket;
}

void wait_for(Lock& lock, const std::shared_ptr<Ticket>& ticket) {
  if (ticket->done) return;
  order().demands.push_back(ticket);
  begin_running();
  order().host_changed.wait(lock, [&] { return ticket->done || order().ended; });
  const auto at = std::ranges::find(order().demands, ticket);
  order().demands.erase(at);
}

void wait_for_device(Lock& lock, int device) {
  std::vector<std::shared_ptr<Ticket>> all;
  Device& d = machine().devices[device];
  std::vector<CUstream_st*> streams;
  for_each_stream([&](CUstream_st& stream) {
    if (stream.device == device && !stream.queue.empty()) streams.push_back(&stream);
  });
  for (CUstream_st* stream : streams) {
    auto ticket = std::make_shared<Ticket>();
    ticket->stream = stream;
    push(*stream, {.kind = Op::Kind::record, .name = "cudaFree", .ticket = ticket});
    all.push_back(std::move(ticket));
  }
  ++d.frees_waiting;
  for (const auto& ticket : all) wait_for(lock, ticket);
  if (--d.frees_waiting == 0) order().host_changed.notify_all();
}

void wait_until_launches_may_begin(Lock& lock, int device) {
  order().host_changed.wait(lock,
                            [&] { return machine().devices[device].frees_waiting == 0 || order().ended; });
}

void let_other_streams_run() {
  Lock lock(machine().mutex);
  CUstream_st& mine = *running_stream;
  mine.waiting = this_worker;
  const std::string name = mine.queue.front().name;
  order().overdue = true;  // other streams must run even if no host thread waits
  CUstream_st* const next = choose();
  if (order().ended) {
    order().running = false;
    order().host_changed.notify_all();
    this_worker->changed.wait(lock, [] { return false; });  // blocks until the process ends
  }
  if (next == nullptr || next == &mine) {
    // No other operation can run until the host enqueues more work.
    this_worker->changed.wait_for(lock, std::chrono::microseconds(50));
    mine.waiting = nullptr;
    return;
  }
  let_run(next->waiting);
  this_worker->changed.wait(lock, [] { return this_worker->chosen; });
  this_worker->chosen = false;
  mine.waiting = nullptr;
  open_memory(reachable_from(mine.device) | mine.queue.front().devices);
  name_running_operation(name.c_str());
}

}  // namespace gradwire::standin
