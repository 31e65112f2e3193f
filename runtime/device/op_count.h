// Counts the ops and launches that a piece of code enqueues: the cost of a step for the host, and for a small
// GPU.
//
//   OpCount count;            // from here to its end, of this thread
//   Graph::capture(stream, [&] { step(); });    // or run it
//   count.ops(), count.launches()
//
// Ops are counted on every device where they are dispatched (kernels/op.h, and copy() and the like), launches
// only on CUDA and in tests/simt.
#pragma once

#include <cstdint>
#include <map>
#include <string>

namespace gradwire {

class OpCount {
 public:
  using ByName = std::map<std::string, int64_t>;

  OpCount();
  ~OpCount();
  OpCount(const OpCount&) = delete;
  OpCount& operator=(const OpCount&) = delete;

  const ByName& ops() const { return ops_; }
  // Returns kernels by the name passed to launch(), cuBLAS products as "gemm".
  const ByName& launches() const { return launches_; }

  static int64_t total(const ByName& counts);

  // Called by dispatchers and launchers. Do nothing when no OpCount exists.
  static void op(const char* name);
  static void launch(const char* name);

 private:
  OpCount* outer_;  // also counts
  ByName ops_, launches_;
};

}  // namespace gradwire
