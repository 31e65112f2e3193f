// Products on cuBLAS. cuBLAS is column-major: a row-major C = A B is its C^T = B^T A^T, so the operands swap.
//
// A cuBLAS handle must not be used by two threads at once, and gives repeatable bits only when its stream and
// its workspace are its own. So each thread keeps one handle per (device, stream), made at the first product
// there, with a workspace of its own; a CUDA graph is therefore captured after one plain run. FP32 products
// never use TF32 unless asked to.
#include <cublas_v2.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <map>
#include <memory>
#include <string>
#include <utility>

#include "kernels/cuda/check.h"
#include "kernels/gemm.h"

namespace gradwire::cuda {
namespace {

void check_cublas(cublasStatus_t status, const char* call) {
  if (status != CUBLAS_STATUS_SUCCESS) {
    throw DeviceError(std::string(call) + ": " + cublasGetStatusName(status) + ": " +
                      cublasGetStatusString(status));
  }
}
#define GW_CUBLAS_CHECK(call) check_cublas((call), #call)

class Handle {
 public:
  Handle(int device, CudaStream stream) {
    GW_CUBLAS_CHECK(cublasCreate(&handle_));
    GW_CUBLAS_CHECK(cublasSetStream(handle_, stream));
    int major = 0;
    GW_CUDA_CHECK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
    const size_t bytes = size_t{major >= 9 ? 32u : 4u} << 20;  // what NVIDIA's documentation recommends
    GW_CUDA_CHECK(cudaMalloc(&workspace_, bytes));
    GW_CUBLAS_CHECK(cublasSetWorkspace(handle_, workspace_, bytes));
  }
  ~Handle() {
    // At thread exit, perhaps after the driver has gone: nothing useful can be done about a failure.
    cublasDestroy(handle_);
    cudaFree(workspace_);
  }
  Handle(const Handle&) = delete;
  Handle& operator=(const Handle&) = delete;
  cublasHandle_t get() const { return handle_; }

 private:
  cublasHandle_t handle_ = nullptr;
  void* workspace_ = nullptr;
};

cublasHandle_t handle_for(CudaStream stream) {
  thread_local std::map<std::pair<int, CudaStream>, std::unique_ptr<Handle>> handles;
  int device = 0;
  GW_CUDA_CHECK(cudaGetDevice(&device));
  auto& handle = handles[{device, stream}];
  if (!handle) handle = std::make_unique<Handle>(device, stream);
  return handle->get();
}

}  // namespace

void gemm(CudaStream stream, const Gemm& g) {
  detail::check(g);
  if (g.m == 0 || g.n == 0 || g.batch == 0) return;
  auto distance = [](int64_t ld) { return static_cast<int>(std::max<int64_t>(1, ld)); };
  GW_CUBLAS_CHECK(cublasGemmStridedBatchedEx(
      handle_for(stream), g.transpose_b ? CUBLAS_OP_T : CUBLAS_OP_N,
      g.transpose_a ? CUBLAS_OP_T : CUBLAS_OP_N, static_cast<int>(g.n), static_cast<int>(g.m),
      static_cast<int>(g.k), &g.alpha, g.b, CUDA_R_32F, distance(g.ldb), g.stride_b, g.a, CUDA_R_32F,
      distance(g.lda), g.stride_a, &g.beta, g.c, CUDA_R_32F, distance(g.ldc), g.stride_c,
      static_cast<int>(g.batch),
      g.precision == Precision::tf32 ? CUBLAS_COMPUTE_32F_FAST_TF32 : CUBLAS_COMPUTE_32F,
      CUBLAS_GEMM_DEFAULT));
}

}  // namespace gradwire::cuda
