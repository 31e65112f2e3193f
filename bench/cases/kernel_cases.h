// Every op of kernels/ as a benchmark case: the tables in kernel_cases.cpp and kernel_cases_model.cpp have
// one entry per case.
//
// To add a case, add an entry that lays out the op's arguments for about `size` bytes of the main array.
// tests/bench_test.py fails for an op without a case.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "bench/harness/measure.h"
#include "kernels/wire/format.h"

namespace gradwire::bench {

// Memory of one device for the cases. Cases allocate pieces, and reset() frees all pieces, so that pages are
// touched only once and not once per case.
class Arena {
 public:
  Arena(const Stream& stream, int64_t bytes);

  void reset();
  // Return a 256-byte aligned array of normally distributed values (a repeated pattern), of zeros, or of a
  // constant. Throw Error when the arena is full.
  float* normal(int64_t count) { return repeated(count, normal_); }
  template <typename T = float>
  T* zeros(int64_t count) {
    return static_cast<T*>(take(count * static_cast<int64_t>(sizeof(T))));
  }
  float* filled(int64_t count, float value);
  // Creates an object that lives until reset(). Returns a pointer to the object.
  template <typename T, typename... Args>
  T* make(Args&&... args) {
    auto object = std::make_shared<T>(std::forward<Args>(args)...);
    objects_.push_back(object);
    return object.get();
  }

  const Stream stream;

 private:
  void* take(int64_t bytes);
  float* repeated(int64_t count, std::span<const float> pattern);

  Buffer memory_;
  int64_t used_ = 0;
  std::vector<float> normal_;
  std::vector<std::shared_ptr<void>> objects_;
};

// The number of arena bytes available to a case per byte of `size`.
inline constexpr int64_t kArenaPerSize = 9;

// An op with its arguments. The op can run repeatedly on the same memory.
struct Problem {
  Work launch;
  double bytes = 0;  // bytes that one launch reads and writes, according to the op's header
  double flops = 0;  // FLOPs of products; 0 for memory-bound ops
  std::string shape;
};

// Returns a launch of `op`, which moves `bytes` per element of `elements`. shape: "" for the number of
// elements.
template <typename Args>
Problem problem(void (*op)(const Stream&, const Args&), const Args& args, double bytes, int64_t elements,
                const std::string& shape = "", double flops = 0) {
  return {[=](const Stream& s) { op(s, args); }, bytes * static_cast<double>(elements), flops,
          shape.empty() ? std::to_string(elements) : shape};
}

struct KernelCase {
  std::string op;       // name of the op
  std::string variant;  // "" if the op has only one variant
  std::string family;   // the op's header, or the wire format
  std::function<Problem(Arena& arena, int64_t size)> make;
  bool fast_on_host = true;  // false: the host's side of the op is its reference

  std::string title() const { return variant.empty() ? op : op + " (" + variant + ")"; }
};

// Return problems of a lossy wire format: an encode that adds `inputs` contributions to this rank's
// contribution, and a decode. `inputs`: 0 for a plain encode, 1 for a hop of a ring, 7 for the owner in a
// two-shot of 8 ranks. `size`: bytes of the gradient.
Problem reduce_encode_problem(Wire wire, Arena& arena, int64_t size, int inputs, bool residual,
                              Rounding rounding);
Problem decode_problem(Wire wire, Arena& arena, int64_t size);

std::span<const KernelCase> model_cases();  // gemm, vit
std::vector<KernelCase> kernel_cases();     // all cases

}  // namespace gradwire::bench
