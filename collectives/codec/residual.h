// The residual of error feedback: FP32 during a step; between steps in the format of the spec's `residual=`.
//
//   fp32   the values themselves, 4 bytes each
//   bf16, int8
//          the bytes of that wire format, 2 and 1.008 per value. load() decodes them into the workspace,
//          which buckets share, and store() encodes them again with stochastic rounding: it is unbiased, so
//          errors cancel over the steps. Rounding to nearest would always lose values that are small compared
//          with the rest of their block.
//
// A codec has one residual. It calls load() before work that reads the residual and store() after work that
// writes it. With a format of w bytes per element, the two move 8 + 2 w bytes per element.
//
// The stored values may lag behind the residual by a step if the codec registers a function with
// settle_with(). read(), write() and clear() then call it.
#pragma once

#include <cstddef>
#include <functional>
#include <span>
#include <string>
#include <utility>

#include "collectives/program/phases.h"
#include "kernels/wire/formats.h"
#include "runtime/device/device.h"

namespace gradwire {

struct BucketContext;

class Residual {
 public:
  // Creates a residual of zeros for all of the bucket's elements, or an empty residual if not `needed`.
  Residual(const BucketContext& context, bool needed);
  Residual(const Residual&) = delete;

  explicit operator bool() const { return count_ > 0; }
  size_t workspace_bytes() const;  // a multiple of 256
  // Returns the workspace after the residual's.
  void* bind(void* workspace);
  // The values, (elements), laid out as the bucket's gradients; null: no residual. Valid between load() and
  // store(); after bind() if the residual is stored in FP32.
  float* values() const { return values_; }
  void load(const Stream& stream, BucketPhases& phases) const;
  void store(const Stream& stream, BucketPhases& phases) const;
  int64_t bytes() const { return static_cast<int64_t>(stored_.bytes()); }
  // Returns " with error feedback in int8".
  std::string describe() const;

  // Enqueues work that brings at least elements [begin, end) up to date. Idempotent.
  using Settle = std::function<void(const Stream& stream, int64_t begin, int64_t end)>;
  void settle_with(Settle settle) { settle_ = std::move(settle); }

  // read() and write() copy bytes of the FP32 values from `first_byte` on; `to` and `from` are in host
  // memory. clear() sets bytes to zero. Call them between steps; they only enqueue work. TensorState
  // describes how to restore values bit for bit.
  void read(const Stream& stream, int64_t first_byte, std::span<std::byte> to) const;
  void write(const Stream& stream, int64_t first_byte, std::span<const std::byte> from) const;
  void clear(const Stream& stream, int64_t first_byte, int64_t bytes) const;

  bool encoded() const { return count_ > 0 && !format_->exact; }
  // Returns whether values were written since the last call, such as a loaded state.
  bool take_written() { return std::exchange(written_, false); }

 private:
  struct Part {
    int64_t first = 0, count = 0;
  };
  // Returns the elements whose blocks hold these bytes.
  Part part_around(int64_t first_byte, int64_t bytes) const;
  // Prepares access to these bytes. Returns the part that holds them.
  Part open(const Stream& stream, int64_t first_byte, int64_t bytes) const;
  void decode(const Stream& stream, Part part) const;
  std::byte* value_bytes(int64_t first_byte) const;
  void encode(const Stream& stream, Part part, const WireRounding& rounding) const;

  Wire format_;
  int64_t count_ = 0;
  Buffer stored_;
  float* values_ = nullptr;
  WireRounding rounding_;
  Settle settle_;
  mutable bool written_ = false;
};

}  // namespace gradwire
