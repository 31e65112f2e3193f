// What a step of the reducer took, read from the marks that it left on the streams.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <memory>

#include "collectives/program/phases.h"
#include "runtime/device.h"

namespace gradwire {

// Of one step.
struct ReducerStats {
  uint64_t wire_bytes = 0;  // sent by this rank, measured at the transport
  // What this rank would have sent in FP32, with the schedule asked for, or the one that `auto` takes for
  // FP32.
  uint64_t dense_bytes = 0;
  double comm_ms = 0;  // while any bucket was under way on the reducer's streams, compression included
  // Its parts: phases.h says where each begins. They add up to it, or to more where two buckets were under
  // way at once.
  double compress_ms = 0, communicate_ms = 0, decompress_ms = 0;
  double exposed_comm_ms = 0;  // how long the stream given to wait() stood still for it
};

// Device memory beyond the gradients themselves, in bytes.
struct ReducerMemory {
  int64_t residual = 0;  // of error feedback
  int64_t factors = 0;   // what else codecs keep: PowerSGD's factors, and what they need on the wire
  int64_t staging = 0;   // encoded and received pieces; shared by all buckets
  int64_t total() const { return residual + factors + staging; }
};

// Marks and counters of one step.
struct StepMarks {
  int64_t step = -1;                 // whose they are
  std::deque<BucketPhases> buckets;  // they stay where they are
  Event wait_begin, wait_end;
  // Before the first bucket and after the last. Written on the reducer's stream, read after wait_end.
  std::shared_ptr<std::array<uint64_t, 2>> bytes_sent = std::make_shared<std::array<uint64_t, 2>>();

  // All but dense_bytes. Once the marks are done; without `timing` there are only bytes.
  ReducerStats stats(bool timing) const;
};

}  // namespace gradwire
