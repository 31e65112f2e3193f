// A program's plan: its work apart from addresses. Internal to collectives/program.
#pragma once

#include <cstdint>
#include <vector>

#include "collectives/program/program.h"

namespace gradwire {

// Immutable. The members are initialized in this order.
struct ProgramPlan {
  // Plans the program. Throws BadInput if the schedule, the format and the transport do not fit together.
  ProgramPlan(Transport& transport, const Schedule& schedule, const ProgramBuffers& buffers,
              Program::Options options);

  int rank() const { return transport.rank(); }
  // Sizes of the program's buffers, in elements.
  int64_t elements_in() const;
  int64_t elements_out() const;
  // Returns a text such as "allreduce of bucket 1 of 2 (4096 floats, ...)" and a hash of all properties that
  // ranks must agree on.
  Call describe() const;

  Transport& transport;
  const Program::Options options;
  const int64_t count;
  const DType dtype;
  const Shards shards;
  const bool uses_library;  // the transport's own allreduce carries out the schedule
  const int slices;
  const bool overlapped;  // exchanges run on a separate stream
  const Schedule schedule;
  const std::vector<ChunkRange> ranges;  // [chunk]
  const Call call;
};

// FP32 memory of a program, and its workspace. The workspace's address is an integer because the pass that
// measures the workspace's size begins at address 0.
struct ProgramMemory {
  const float* in = nullptr;
  float* out = nullptr;
  float* residual = nullptr;
  uintptr_t workspace = 0;
};

}  // namespace gradwire
