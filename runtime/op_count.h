// How many ops and launches a piece of code enqueues: what a step costs the host, and a small GPU.
//
//   OpCount count;            // from here to its end, of this thread
//   Graph::capture(stream, [&] { step(); });    // or run it
//   count.ops(), count.launches()
//
// Ops are counted on every device where they are dispatched (kernels/op.h, and copy() and the like), launches only
// where there are some: on CUDA, and in tests/simt.
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
  // Kernels by the name given to launch(), cuBLAS products as "gemm".
  const ByName& launches() const { return launches_; }

  static int64_t total(const ByName& counts);

  // What dispatchers and launchers call. Nothing happens while nobody counts.
  static void op(const char* name);
  static void launch(const char* name);

 private:
  OpCount* outer_;  // counts as well
  ByName ops_, launches_;
};

}  // namespace gradwire
