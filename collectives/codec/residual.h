// The residual of error feedback: FP32 during a step, and between steps what `residual=` of the spec says.
//
//   fp32   the values themselves, 4 bytes each
//   bf16   2 bytes each, int8 1.008: the bytes of that wire format. load() decodes them into the workspace,
//          which buckets share, and store() encodes them again, rounding at random: the mean of what is kept
//          is what there was to keep, so that what is lost in a step is gained in another. Rounding to nearest
//          would lose, every time, what is small beside the rest of its block.
//
// A codec keeps one, and calls load() before the work that reads the residual and store() after the work that
// writes it. Bytes per element beyond FP32's, w being the format's: 8 + 2 w.
//
// What is kept may lag behind the residual by a step, if the codec says how to catch up (settle_with); readers and
// writers between steps then do.
#pragma once

#include <cstddef>
#include <functional>
#include <span>
#include <string>
#include <utility>

#include "collectives/program/phases.h"
#include "kernels/wire/formats.h"
#include "runtime/device.h"

namespace gradwire {

struct BucketContext;

class Residual {
 public:
  // Zero; for all of the bucket's elements or, if not `needed`, for none.
  Residual(const BucketContext& context, bool needed);
  Residual(const Residual&) = delete;

  explicit operator bool() const { return count_ > 0; }
  size_t workspace_bytes() const;  // a multiple of 256
  // Returns the workspace after the residual's.
  void* bind(void* workspace);
  // (elements), laid out as the bucket's gradients; null: none is kept. Between load() and store(), and after
  // bind(), unless the residual is kept in FP32.
  float* values() const { return values_; }
  void load(const Stream& stream, BucketPhases& phases) const;
  void store(const Stream& stream, BucketPhases& phases) const;
  int64_t bytes() const { return static_cast<int64_t>(kept_.bytes()); }
  // " with error feedback in int8"
  std::string describe() const;

  // Enqueues work that brings elements [begin, end) up to date, or more of them; twice does no harm.
  using Settle = std::function<void(const Stream& stream, int64_t begin, int64_t end)>;
  void settle_with(Settle settle) { settle_ = std::move(settle); }

  // `to` or `from` are bytes of the FP32 values from `first_byte` on, in host memory. Between steps; these enqueue
  // only. TensorState says how values come back bit for bit.
  void read(const Stream& stream, int64_t first_byte, std::span<std::byte> to) const;
  void write(const Stream& stream, int64_t first_byte, std::span<const std::byte> from) const;
  void clear(const Stream& stream, int64_t first_byte, int64_t bytes) const;

  bool encoded() const { return count_ > 0 && !format_->exact; }
  // Whether values were written since the last call, such as a loaded state.
  bool take_written() { return std::exchange(written_, false); }

 private:
  struct Part {
    int64_t first = 0, count = 0;
  };
  // The elements whose blocks hold these bytes.
  Part part_around(int64_t first_byte, int64_t bytes) const;
  // Before access to some of its bytes, and where they are then.
  Part open(const Stream& stream, int64_t first_byte, int64_t bytes) const;
  void decode(const Stream& stream, Part part) const;
  std::byte* value_bytes(int64_t first_byte) const;
  void encode(const Stream& stream, Part part, const WireRounding& rounding) const;

  Wire format_;
  int64_t count_ = 0;
  Buffer kept_;
  float* values_ = nullptr;
  WireRounding rounding_;
  Settle settle_;
  mutable bool written_ = false;
};

}  // namespace gradwire
