// Counts the ops and launches that a section of code enqueues. The counts measure the cost of a step for the
// host, and for a small GPU.
//
//   OpCount count;            // counts in this thread until the end of the scope
//   Graph::capture(stream, [&] { step(); });    // or run it
//   count.ops(), count.launches()
//
// Ops are counted on every device where they are dispatched (kernels/op.h, copy(), store() and similar
// functions); launches are counted only on CUDA and in tests/simt.
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

}  // namespace gradwire
