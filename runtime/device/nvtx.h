// Ranges for NVIDIA's profilers, in the domain "gradwire": the profiler shows work that the host enqueues in
// a range under the range's name on the GPU. NVTX is a header that calls nothing until a profiler is
// attached, so ranges are always compiled in; without the CUDA side they are empty functions. For users:
// docs/training.md.
#pragma once

#include <cstdint>
#include <string>

#include "runtime/device/device.h"

namespace gradwire {

// The kinds of work in a profile and in a trace.
enum class Activity : uint8_t { batch, forward, backward, compress, communicate, decompress, optimizer };
inline constexpr int kActivities = 7;
const char* name(Activity activity);  // returns "batch", "forward", ...

// A range from construction to destruction, which must be in the same thread; a thread's ranges nest.
class NvtxRange {
 public:
  // Begins a range. `number`: a step or a bucket, shown next to the name.
  NvtxRange(Activity activity, int64_t number);
  ~NvtxRange();
  NvtxRange(const NvtxRange&) = delete;
};

// Sets the name under which profilers show the stream.
void name_stream(CudaStream stream, const std::string& name);

}  // namespace gradwire
