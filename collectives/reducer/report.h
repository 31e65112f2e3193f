// Times and bytes of a reducer's step, read from marks on the streams.
#pragma once

#include <array>
#include <cmath>
#include <cstdint>
#include <deque>
#include <memory>

#include "collectives/program/program.h"
#include "runtime/device/device.h"

namespace gradwire {

// Statistics of one step.
struct ReducerStats {
  uint64_t wire_bytes = 0;  // bytes that this rank sent, measured at the transport
  // The bytes that this rank would have sent in FP32, with the requested schedule or the schedule that `auto`
  // chooses for FP32.
  uint64_t dense_bytes = 0;
  // Time in which any bucket was in progress on the reducer's streams, including compression.
  double comm_ms = 0;
  // Parts of comm_ms, as defined in program.h. Their sum exceeds comm_ms if two buckets overlapped.
  double compress_ms = 0, communicate_ms = 0, decompress_ms = 0;
  double exposed_comm_ms = 0;  // time for which the stream given to wait() was stalled
};

// Device memory beyond the gradients themselves, in bytes.
struct ReducerMemory {
  int64_t residual = 0;  // residuals of error feedback
  int64_t factors = 0;   // other codec memory: PowerSGD's factors and the buffers for sending them
  int64_t staging = 0;   // encoded and received pieces; shared by all buckets
  int64_t total() const { return residual + factors + staging; }
};

// Marks and counters of one step.
struct StepMarks {
  int64_t step = -1;
  std::deque<BucketPhases> buckets;  // a deque, so that elements do not move
  size_t first = 0;                  // the first bucket launched
  Event wait_begin, wait_end;
  // Bytes sent before the first bucket and after the last bucket. Written on the reducer's stream, read after
  // wait_end.
  std::shared_ptr<std::array<uint64_t, 2>> bytes_sent = std::make_shared<std::array<uint64_t, 2>>();
};

// The relative L2 error of one encode, over all tensors of a model.

// Adds up tensors' squared relative errors, weighted by elements. Tensors of zeros do not count.
class RelativeError {
 public:
  // `exact`, `result`: functions from an index to a number.
  template <typename Exact, typename Result>
  void add(const Exact& exact, const Result& result, int64_t count) {
    double change = 0, norm = 0;
    for (int64_t i = 0; i < count; ++i) {
      const double value = exact(i), difference = result(i) - value;
      norm += value * value;
      change += difference * difference;
    }
    if (norm == 0) return;
    weighted_ += static_cast<double>(count) * change / norm;
    elements_ += static_cast<double>(count);
  }
  double root() const { return elements_ == 0 ? 0 : std::sqrt(weighted_ / elements_); }
  bool empty() const { return elements_ == 0; }

 private:
  double weighted_ = 0, elements_ = 0;
};

}  // namespace gradwire
