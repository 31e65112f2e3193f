// What a run takes of each device's memory, known before it starts.
#pragma once

#include <cstdint>
#include <string>

#include "collectives/reducer/reducer.h"
#include "trainer/config/config.h"

namespace gradwire {

struct RunMemory {
  int64_t model = 0;      // weights and activations of one batch
  int64_t gradients = 0;  // one FP32 value per parameter, gaps between tensors included
  int64_t optimizer = 0;
  ReducerMemory compression;  // beyond the gradients
};

// Of rank 0; the others differ by the rounding of their chunks. Builds what a run would build, on the host
// and without peers, so it needs about as much host memory while it looks, but for activations, which are not
// touched.
RunMemory plan_memory(const TrainConfig& config);

// Two lines, for people.
std::string memory_text(const TrainConfig& config, const RunMemory& memory);

}  // namespace gradwire
