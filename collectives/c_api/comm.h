// What a gw_comm stands for: a communicator, the one stream all its operations run on, in the order of the
// calls, and the programs of gw_allreduce().
#pragma once

#include <sys/types.h>

#include <chrono>
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

  // Throws BadHandle in a fork of the process: the threads that do the work are not there.
  void check_process() const;
  // The caller's stream: `native` is a cudaStream_t on CUDA, and null on the host.
  Stream caller_stream(void* native);
  void allreduce(void* buf, int64_t count, gw_dtype dtype, gw_op op, const char* spec, void* native_stream,
                 const std::string& tag);
  // Numbers the reducers; the same on every rank, since creating one is collective.
  int next_reducer() { return ++reducers_; }

  const std::unique_ptr<Communicator> communicator;
  std::mutex mutex;  // held during every call but abort

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

// What gw_call_tag() said on this thread about `comm`, once: "" the next time.
std::string take_tag(gw_comm comm);
void set_tag(gw_comm comm, const char* tag);
// " 'TAG'", shortened in the middle, for texts; "" without a tag. Different for different tags.
std::string quoted(const std::string& tag);

// "local://": threads of one process meet under a name. Blocks until all of them have come.
std::unique_ptr<Communicator> join_local_group(const std::string& name, int rank, int world, Device device,
                                               std::chrono::milliseconds timeout);

}  // namespace gradwire::c_api
