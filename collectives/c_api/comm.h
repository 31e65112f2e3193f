// The object behind a gw_comm: a communicator, the stream on which all operations run in call order, and the
// programs of the collectives on the caller's memory.
#pragma once

#include <gradwire/gradwire.h>
#include <sys/types.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "collectives/communicator/communicator.h"
#include "collectives/program/program.h"
#include "collectives/spec/spec.h"
#include "kernels/powersgd/powersgd.h"
#include "runtime/device/device.h"
#include "runtime/threads/running_clock.h"
#include "runtime/util/parse.h"

namespace gradwire::c_api {

// The arguments of a collective on the caller's memory.
struct CollectiveCall {
  const char* function = "";  // name for error texts, e.g. "gw_reduce_scatter"
  Collective collective = Collective::allreduce;
  const void* in = nullptr;
  void* out = nullptr;
  float* residual = nullptr;
  int64_t count = 0;
  Shards shards = {};
  gw_dtype dtype = GW_FLOAT32;
  gw_op op = GW_SUM;
  int root = 0;
  std::string spec = {};
  std::string tag = {};
};

struct ApiRequest;

struct ApiComm {
  explicit ApiComm(std::unique_ptr<Communicator> communicator);
  ~ApiComm();

  // Throws BadHandle in a forked child process, which lacks the threads that do the work.
  void check_process() const;
  // Throws the errors of check_process(). Throws BadInput in a callback of a wire format, because a call from
  // the callback would deadlock.
  void check_caller() const;
  // Returns the caller's stream. On CUDA `native` is a cudaStream_t. On the host `native` is null, and the
  // stream blocks the caller unless the call has a request.
  Stream caller_stream(void* native);
  // Enqueues the collective after earlier work and before later work on the caller's stream. Defined in
  // collectives.cpp.
  void run(const CollectiveCall& call, void* native_stream);
  // Implements gw_all_gather_update(): `call` gathers masters (in) into replicas (out). Enqueues work as
  // run() does.
  void run_update(const CollectiveCall& call, void* native_stream);
  // Runs `wait`, which blocks until work on the host is done. If the work failed on this rank alone, for
  // example in a registered format, notifies the other ranks so that the other ranks fail now rather than
  // time out.
  void wait_or_notify(const std::function<void()>& wait);
  // Runs `work`, which enqueues on `stream`, after earlier and before later work on the caller's stream.
  void between(void* native_stream, const std::function<void()>& work);
  // Returns a copy of `text` for gw_comm_info. The copy lives as long as this object.
  const char* kept(const std::string& text) { return kept_.insert(text).first->c_str(); }
  // Aborts the communicator. Also cancels the calls that create other communicators from this communicator,
  // because Communicator::abort() does not end the waits of such calls.
  void abort(const std::string& reason) {
    __atomic_store_n(&aborted, 1, __ATOMIC_RELAXED);
    communicator->abort(reason);
  }
  // Returns the number of a new reducer. All ranks get the same number, because creating a reducer is
  // collective.
  int next_reducer() { return ++reducers_; }

  // The memory of gw_orthonormalize() for one list of shapes, so that later calls neither allocate nor wait.
  struct Orthonormalization {
    MatrixTable table;
    Buffer step, host_step = {}, scratch = {};
    Event done = {};  // of the call that used this memory last
  };
  std::map<std::vector<int64_t>, Orthonormalization> orthonormalizations;  // [shapes, `second`]

  const std::unique_ptr<Communicator> communicator;
  std::mutex mutex;  // held during every call except abort
  // The request of the call that holds `mutex`; null: the call blocks until the work is done.
  ApiRequest* request = nullptr;
  volatile int32_t aborted = 0;

 private:
  // Key of a program: function, address (null: any; see program_for()), count, shards, dtype, op, root, spec,
  // tag.
  using Key = std::tuple<std::string, const void*, int64_t, Shards, int, int, int, std::string, std::string>;
  Program& program_for(const CollectiveCall& call);
  const CompressionSpec& parsed(const std::string& spec);

  const pid_t process_;
  ProgramCache<Key> programs_;
  std::map<std::string, CompressionSpec> specs_;  // [spec's text]: the parsed spec
  std::map<void*, Stream> callers_;
  Stream requests_;    // for calls with a request; created by the first such call
  Buffer difference_;  // masters minus replicas, in gw_all_gather_update()
  Buffer step_;        // the counter of stochastic rounding
  Event start_, done_;
  int reducers_ = 0;
  std::set<std::string> kept_;

 public:
  Stream stream;  // last member: destroyed before all memory that the stream's tasks use
};

// A live communicator, locked for the duration of a call.
struct LockedComm {
  explicit LockedComm(gw_comm handle);
  ApiComm* operator->() const { return comm.get(); }
  std::shared_ptr<ApiComm> comm;
  std::unique_lock<std::mutex> lock;  // released before `comm`
};

// Creates communicators, for gw_comm_create() and for calls that make one communicator from another.

// The description of this library that ranks compare when they join: another version may compute other bits.
constexpr const char* kAbout = "Gradwire " GRADWIRE_VERSION;

// Creates or joins a group. Returns this rank's communicator. Throws BadInput for invalid options.
std::unique_ptr<Communicator> create(const gw_comm_options& options);

std::chrono::milliseconds checked_timeout(int64_t timeout_ms);

// Lets another thread cancel this thread's waits; see RunningClock::cancel_by().
class CancelledBy {
 public:
  explicit CancelledBy(const volatile int32_t* flag) { RunningClock::cancel_by(flag); }
  ~CancelledBy() { RunningClock::cancel_by(nullptr); }
  CancelledBy(const CancelledBy&) = delete;
  // Throws CommError if this thread's flag is already set, because the flag does not cancel waits that begin
  // later.
  static void refuse();
};

// The object behind a gw_request: a collective call on the host that returned before its result was ready.

struct ApiRequest {
  const std::shared_ptr<ApiComm> comm;
  Event done = Event::create(comm->communicator->device());  // the end of the call's work
};

// Creates the request of a call that holds a communicator's lock. Does nothing if `out` is null.
class CallRequest {
 public:
  CallRequest(const std::shared_ptr<ApiComm>& comm, gw_request* out);
  ~CallRequest();
  CallRequest(const CallRequest&) = delete;
  // Writes the handle to `out`. Call start() once all work of the call is enqueued.
  void start();
  const std::shared_ptr<ApiRequest>& get() const { return request_; }

 private:
  ApiComm& comm_;
  gw_request* const out_;
  std::shared_ptr<ApiRequest> request_;
  gw_request handle_ = nullptr;  // null: the caller owns the handle
};

}  // namespace gradwire::c_api
