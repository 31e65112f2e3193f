// The residual of error feedback: FP32 during a step; between steps in the format of the spec's `residual=`.
//
//   fp32   the values themselves, 4 bytes each
//   bf16, int8
//          the values encoded in this wire format, 2 and 1.008 bytes per value. load() decodes the values
//          into the workspace, which buckets share. store() encodes the values with stochastic rounding,
//          which is unbiased, so that errors cancel over the steps. Rounding to nearest would always lose
//          values that are small compared with the other values of the block.
//
// A codec has one residual. It calls load() before work that reads the residual and store() after work that
// writes the residual. At the beginning of a step, load() multiplies the residual by the spec's ef_decay.
// With a format of w bytes per element, the two together move 8 + 2 w bytes per element; in FP32, ef_decay
// moves 8.
//
// The stored values may lag behind the residual by a step if the codec registers a function with
// settle_with(). read(), write() and clear() then call this function.
#pragma once

#include <cstddef>
#include <functional>
#include <span>
#include <string>
#include <utility>

#include "collectives/program/program.h"
#include "kernels/wire/format.h"
#include "runtime/device/device.h"

namespace gradwire {

struct BucketContext;

// Multiplies `count` values of a residual by `decay`.
void decay_residual(const Stream& stream, float* residual, int64_t count, float decay);

class Residual {
 public:
  // Creates a residual of zeros for all of the bucket's elements, or an empty residual if not `needed`.
  Residual(const BucketContext& context, bool needed);
  Residual(const Residual&) = delete;

  explicit operator bool() const { return count_ > 0; }
  size_t workspace_bytes() const;  // a multiple of 256
  // Sets the residual's workspace. Returns the address of the memory that follows the residual's workspace.
  void* bind(void* workspace);
  // Returns the values, (elements), laid out as the bucket's gradients; null without a residual. Valid
  // between load() and store(). A residual stored in FP32 is always valid after bind().
  float* values() const { return values_; }
  // Loads the values; at the beginning of a step, times ef_decay.
  void load(const Stream& stream, BucketPhases& phases, bool begins_step = false) const;
  // Enqueues the codec's work on the values that it left pending.
  void settle(const Stream& stream) const {
    if (settle_) settle_(stream, 0, count_);
  }
  void store(const Stream& stream, BucketPhases& phases) const;
  int64_t bytes() const { return static_cast<int64_t>(stored_.bytes()); }
  // Returns a text such as " with error feedback in int8".
  std::string describe() const;

  // Enqueues work that brings at least elements [begin, end) up to date. Idempotent.
  using Settle = std::function<void(const Stream& stream, int64_t begin, int64_t end)>;
  void settle_with(Settle settle) { settle_ = std::move(settle); }

  // Copy bytes of the FP32 values from `first_byte` on, to and from host memory, or set bytes to zero
  // (clear()). These functions only enqueue work and may be called only between steps. TensorState describes
  // how to restore values bit for bit.
  void read(const Stream& stream, int64_t first_byte, std::span<std::byte> to) const;
  void write(const Stream& stream, int64_t first_byte, std::span<const std::byte> from) const;
  void clear(const Stream& stream, int64_t first_byte, int64_t bytes) const;

  bool encoded() const { return count_ > 0 && !format_->exact; }
  // Returns whether values were written since the last call, for example by loading a state.
  bool take_written() { return std::exchange(written_, false); }

 private:
  // Prepares access to these bytes. Returns the part of whole blocks that holds them.
  ElementRange open(const Stream& stream, int64_t first_byte, int64_t bytes) const;
  void decode(const Stream& stream, ElementRange part, float scale = 1.0f) const;
  std::byte* value_bytes(int64_t first_byte) const;
  void encode(const Stream& stream, ElementRange part, const WireRounding& rounding) const;

  Wire format_;
  int64_t count_ = 0;
  float decay_ = 1.0f;
  Buffer stored_;
  float* values_ = nullptr;
  WireRounding rounding_;
  Settle settle_;
  mutable bool written_ = false;
};

}  // namespace gradwire
