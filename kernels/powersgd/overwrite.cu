// Overwrites the factors of marked matrices: a block per matrix, which ends at once when the matrix is not
// marked.
#include "kernels/powersgd/powersgd.h"
#include "runtime/device/launch.cuh"

namespace gradwire::cuda {
namespace {

constexpr int kThreads = 256;

__global__ void __launch_bounds__(kThreads)
    overwrite_kernel(const MatrixDescriptor* matrices, const int32_t* marks, float* p, float* q,
                     float value) {
  if (marks[blockIdx.x] == 0) return;
  const MatrixDescriptor d = matrices[blockIdx.x];
  float* factor = p != nullptr ? p + d.p_offset : q + d.q_offset;
  const int64_t count = static_cast<int64_t>(p != nullptr ? d.rows : d.cols) * d.rank;
  for (int64_t i = threadIdx.x; i < count; i += kThreads) factor[i] = value;
}

}  // namespace

void powersgd_overwrite(CudaStream stream, const PowerSgdOverwrite& a) {
  launch("powersgd_overwrite", overwrite_kernel,
         {.grid = dim3(static_cast<unsigned>(a.table->count())), .block = dim3(kThreads), .stream = stream},
         a.table->device(), a.marks, a.p, a.q, a.value);
}

}  // namespace gradwire::cuda
