// Pack and unpack (see kernels/powersgd/powersgd.h): blockIdx.y is the segment, divided among the blocks
// along x.
#include "kernels/powersgd/powersgd.h"

#include <algorithm>

#include "runtime/device/launch.cuh"

namespace gradwire::cuda {
namespace {

constexpr int kThreads = 256;

__global__ void __launch_bounds__(kThreads)
    pack_kernel(const Segment* __restrict__ table, int first, float* scattered, float* packed, bool unpack) {
  wait_for_earlier_kernels();
  const Segment s = table[first + blockIdx.y];
  const int64_t start = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  const int64_t stride = int64_t{gridDim.x} * kThreads;
  if (unpack && packed == nullptr) {
    for (int64_t i = start; i < s.count; i += stride) scattered[s.scattered + i] = 0.0f;
    return;
  }
  const float* from = unpack ? packed + s.packed : scattered + s.scattered;
  float* to = unpack ? scattered + s.scattered : packed + s.packed;
  const bool aligned = (reinterpret_cast<uintptr_t>(from) | reinterpret_cast<uintptr_t>(to)) % 16 == 0;
  const int64_t quads = aligned ? s.count / 4 : 0;
  for (int64_t i = start; i < quads; i += stride) {
    reinterpret_cast<float4*>(to)[i] = reinterpret_cast<const float4*>(from)[i];
  }
  for (int64_t i = quads * 4 + start; i < s.count; i += stride) to[i] = from[i];
}

// A block per matrix, which ends at once when the matrix is not marked.
__global__ void __launch_bounds__(kThreads)
    overwrite_kernel(const MatrixDescriptor* matrices, const int32_t* marks, float* p, float* q,
                     float value) {
  wait_for_earlier_kernels();
  if (marks[blockIdx.x] == 0) return;
  const MatrixDescriptor d = matrices[blockIdx.x];
  float* factor = p != nullptr ? p + d.p_offset : q + d.q_offset;
  const int64_t count = static_cast<int64_t>(p != nullptr ? d.rows : d.cols) * d.rank;
  for (int64_t i = threadIdx.x; i < count; i += kThreads) factor[i] = value;
}

}  // namespace

void pack(CudaStream stream, const Pack& a) {
  constexpr int kMaxRows = 65535;  // limit of gridDim.y
  // Few blocks per tensor, because the tensors share the device.
  const int64_t needed = (a.table->longest() + 4 * kThreads - 1) / (4 * kThreads);
  const auto columns = static_cast<unsigned>(std::min<int64_t>(needed, 2 * multiprocessors()));
  for (int first = 0; first < a.table->count(); first += kMaxRows) {
    const int rows = a.table->count() - first < kMaxRows ? a.table->count() - first : kMaxRows;
    launch("pack", pack_kernel,
           {.grid = dim3(columns, static_cast<unsigned>(rows)), .block = dim3(kThreads), .stream = stream},
           a.table->device(), first, a.scattered, a.packed, a.unpack);
  }
}

void powersgd_overwrite(CudaStream stream, const PowerSgdOverwrite& a) {
  launch("powersgd_overwrite", overwrite_kernel,
         {.grid = dim3(static_cast<unsigned>(a.table->count())), .block = dim3(kThreads), .stream = stream},
         a.table->device(), a.marks, a.p, a.q, a.value);
}

}  // namespace gradwire::cuda
