// What a gw_comm refers to: a communicator, the one stream on which all its operations run in call order, and
// the programs of gw_allreduce().
#pragma once

#include <sys/types.h>

#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "collectives/communicator/communicator.h"
#include "collectives/gradwire.h"
#include "collectives/program/cache.h"
#include "collectives/spec/spec.h"
#include "runtime/device.h"

namespace gradwire::c_api {

struct ApiComm {
  explicit ApiComm(std::unique_ptr<Communicator> communicator);
  ~ApiComm();

  // Throws BadHandle in a fork of the process, which lacks the threads that do the work.
  void check_process() const;
  // The same, and throws BadInput in a wire format's callback, which the caller would wait for.
  void check_caller() const;
  // The caller's stream: `native` is a cudaStream_t on CUDA, and null on the host.
  Stream caller_stream(void* native);
  void allreduce(void* buf, int64_t count, gw_dtype dtype, gw_op op, const char* spec, void* native_stream,
                 const std::string& tag);
  // Runs `wait`, which blocks until work on the host is done. If that failed here alone, as a registered wire
  // format may, the other ranks are told, who would otherwise wait until their deadline.
  void wait_and_tell(const std::function<void()>& wait);
  // Numbers the reducers, identically on every rank because creating one is collective.
  int next_reducer() { return ++reducers_; }

  const std::unique_ptr<Communicator> communicator;
  std::mutex mutex;  // held during every call except abort

 private:
  using Key = std::tuple<void*, int64_t, int, int, std::string, std::string>;
  Program& program_for(const Key& key);

  const pid_t process_;
  ProgramCache<Key> programs_;
  std::map<void*, Stream> callers_;
  Buffer step_;  // the counter of stochastic rounding
  Event start_, done_;
  int reducers_ = 0;

 public:
  Stream stream;  // last: destroyed first, before anything its tasks use
};

// The tag that gw_call_tag() set on this thread for `comm`, and clears it: the next call returns "".
std::string take_tag(gw_comm comm);
void set_tag(gw_comm comm, const char* tag);
// " 'TAG'" for error texts; "" without a tag. A long tag is shortened in the middle and gets a digest, so
// that different tags stay different.
std::string quoted(const std::string& tag);

// "local://": threads of one process meet under a name. Blocks until all have arrived.
std::unique_ptr<Communicator> join_local_group(const std::string& name, int rank, int world, Device device,
                                               std::chrono::milliseconds timeout);

}  // namespace gradwire::c_api
