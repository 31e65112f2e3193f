// A stand-in for cuBLAS, cuBLASLt and the CUDA runtime calls in kernels/gemm. Computes on the host in double
// precision, as the libraries' documentation specifies. Stores descriptors, and so detects missing and
// invalid settings. Rejects calls that the documentation excludes (cublas_rules.h). Only tests on a GPU show
// which calls the library really supports.
#include "tests/simt/cublas_stand_in.h"

#include <cublasLt.h>
#include <cublas_v2.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <initializer_list>
#include <span>
#include <utility>
#include <vector>

#include "kernels/math/small_float.h"
#include "tests/simt/cublas_rules.h"
#ifdef GRADWIRE_STANDIN
#include "tests/standin/launch.h"
#endif

namespace {

using gradwire::Bf16;
using gradwire::simt::LtPreference;
using gradwire::simt::LtProblem;
using Operation = gradwire::simt::LtOperation;
using Layout = gradwire::simt::LtLayout;

bool refuses_gelu = false, refuses_bias = false;

Operation& of(cublasLtMatmulDesc_t desc) {
  return *reinterpret_cast<Operation*>(desc);
}
Layout& of(cublasLtMatrixLayout_t layout) {
  return *reinterpret_cast<Layout*>(layout);
}
LtPreference& of(cublasLtMatmulPreference_t preference) {
  return *reinterpret_cast<LtPreference*>(preference);
}

// An attribute of a descriptor and the member that stores its value.
struct Attribute {
  template <typename T>
  Attribute(int which, T& member) : which(which), member(&member), bytes(sizeof member) {}
  int which;
  void* member;
  size_t bytes;
};
cublasStatus_t assign(int which, const void* value, size_t bytes, std::initializer_list<Attribute> known) {
  for (const Attribute& attribute : known) {
    if (attribute.which != which || attribute.bytes != bytes) continue;
    std::memcpy(attribute.member, value, bytes);
    return CUBLAS_STATUS_SUCCESS;
  }
  return CUBLAS_STATUS_INVALID_VALUE;
}

double get(const void* data, cudaDataType type, int64_t i) {
  return type == CUDA_R_16BF ? gradwire::widen(static_cast<const Bf16*>(data)[i])
                             : static_cast<const float*>(data)[i];
}
void put(void* data, cudaDataType type, int64_t i, double value) {
  if (type == CUDA_R_16BF) {
    static_cast<Bf16*>(data)[i] = gradwire::narrow<Bf16>(static_cast<float>(value));
  } else {
    static_cast<float*>(data)[i] = static_cast<float>(value);
  }
}

double half_argument(double x) {
  return std::sqrt(2.0 / M_PI) * (x + 0.044715 * x * x * x);
}
double gelu(double x) {
  return 0.5 * x * (1.0 + std::tanh(half_argument(x)));
}
double gelu_derivative(double x) {
  const double t = std::tanh(half_argument(x));
  return 0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * std::sqrt(2.0 / M_PI) * (1.0 + 0.134145 * x * x);
}

// A product D = alpha op(A) op(B) + beta C, followed by the epilogue.
struct Product {
  bool transpose_a, transpose_b;
  int64_t rows, columns, inner;
  const void* a;
  Layout la;
  const void* b;
  Layout lb;
  void* d;
  Layout ld;
  double alpha, beta;
};
// Returns the elements of a matrix as doubles, row by row. The matrix has `rows` rows of `inner` elements
// with strides `row_step` and `inner_step`.
std::vector<double> unpack(const void* data, const Layout& layout, int64_t begin, int64_t rows, int64_t inner,
                           int64_t row_step, int64_t inner_step) {
  std::vector<double> all(rows * inner);
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t k = 0; k < inner; ++k)
      all[row * inner + k] = get(data, layout.type, begin + row * row_step + k * inner_step);
  }
  return all;
}
// Returns the dot product. Uses a few partial sums, which the compiler can keep in vector registers.
double dot(const double* a, const double* b, int64_t n) {
  constexpr int kSums = 8;
  double sums[kSums] = {};
  int64_t k = 0;
  for (; k + kSums <= n; k += kSums) {
    for (int i = 0; i < kSums; ++i) sums[i] += a[k + i] * b[k + i];
  }
  for (; k < n; ++k) sums[0] += a[k] * b[k];
  for (int i = 1; i < kSums; ++i) sums[0] += sums[i];
  return sums[0];
}
void multiply(const Product& p, int64_t index,
              const std::function<double(double, int64_t, int64_t)>& finish) {
  const int64_t a_row = p.la.row_step(), a_column = p.la.column_step();
  const int64_t b_row = p.lb.row_step(), b_column = p.lb.column_step();
  const std::vector<double> a = unpack(p.a, p.la, index * p.la.stride, p.rows, p.inner,
                                       p.transpose_a ? a_column : a_row, p.transpose_a ? a_row : a_column);
  const std::vector<double> b = unpack(p.b, p.lb, index * p.lb.stride, p.columns, p.inner,
                                       p.transpose_b ? b_row : b_column, p.transpose_b ? b_column : b_row);
  for (int64_t column = 0; column < p.columns; ++column) {
    for (int64_t row = 0; row < p.rows; ++row) {
      const int64_t at = index * p.ld.stride + column * p.ld.column_step() + row * p.ld.row_step();
      double x = p.alpha * dot(a.data() + row * p.inner, b.data() + column * p.inner, p.inner);
      if (p.beta != 0.0) x += p.beta * get(p.d, p.ld.type, at);
      put(p.d, p.ld.type, at, finish(x, row, column));
    }
  }
}

struct Handle {
  cudaStream_t stream = nullptr;
};

// Runs a product immediately or, in tests/standin, in the order of its stream.
cublasStatus_t enqueue([[maybe_unused]] const char* name, [[maybe_unused]] cudaStream_t stream,
                       [[maybe_unused]] std::initializer_list<const void*> pointers,
                       std::function<void()> product) {
#ifdef GRADWIRE_STANDIN
  const int status = gradwire::standin::enqueue_library_call(
      name, stream, std::span(pointers.begin(), pointers.size()), std::move(product));
  return status == cudaSuccess ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_EXECUTION_FAILED;
#else
  product();
  return CUBLAS_STATUS_SUCCESS;
#endif
}

// Returns SUCCESS, or the status with which the library refuses a product. Also refuses biases and GELU on
// request of a test.
cublasStatus_t examine_product(const LtProblem& p) {
  if (const cublasStatus_t status = gradwire::simt::examine(p); status != CUBLAS_STATUS_SUCCESS)
    return status;
  const bool refused = (p.operation.has_bias() && refuses_bias) || (p.operation.is_gelu() && refuses_gelu);
  return refused ? CUBLAS_STATUS_NOT_SUPPORTED : CUBLAS_STATUS_SUCCESS;
}

}  // namespace

void gradwire::simt::refuse_gelu_epilogues(bool refuses) {
  refuses_gelu = refuses;
}
void gradwire::simt::refuse_biases(bool refuses) {
  refuses_bias = refuses;
}

extern "C" {

cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t* desc, cublasComputeType_t compute,
                                        cudaDataType_t scale) {
  *desc = reinterpret_cast<cublasLtMatmulDesc_t>(new Operation{compute, scale});
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t desc) {
  delete &of(desc);
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t desc,
                                              cublasLtMatmulDescAttributes_t attribute, const void* value,
                                              size_t bytes) {
  Operation& o = of(desc);
  return assign(attribute, value, bytes,
                {{CUBLASLT_MATMUL_DESC_TRANSA, o.a},
                 {CUBLASLT_MATMUL_DESC_TRANSB, o.b},
                 {CUBLASLT_MATMUL_DESC_EPILOGUE, o.epilogue},
                 {CUBLASLT_MATMUL_DESC_BIAS_POINTER, o.bias},
                 {CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, o.bias_type},
                 {CUBLASLT_MATMUL_DESC_BIAS_BATCH_STRIDE, o.bias_stride},
                 {CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, o.aux},
                 {CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, o.aux_ld},
                 {CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_DATA_TYPE, o.aux_type},
                 {CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_BATCH_STRIDE, o.aux_stride}});
}
cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t* layout, cudaDataType type, uint64_t rows,
                                          uint64_t columns, int64_t ld) {
  *layout = reinterpret_cast<cublasLtMatrixLayout_t>(new Layout{type, rows, columns, ld});
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t layout) {
  delete &of(layout);
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatrixLayoutSetAttribute(cublasLtMatrixLayout_t layout,
                                                cublasLtMatrixLayoutAttribute_t attribute, const void* value,
                                                size_t bytes) {
  return assign(attribute, value, bytes,
                {{CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, of(layout).batch},
                 {CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, of(layout).stride},
                 {CUBLASLT_MATRIX_LAYOUT_ORDER, of(layout).order}});
}
cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t* preference) {
  *preference = reinterpret_cast<cublasLtMatmulPreference_t>(new LtPreference);
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t preference) {
  delete &of(preference);
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t preference,
                                                    cublasLtMatmulPreferenceAttributes_t attribute,
                                                    const void* value, size_t bytes) {
  LtPreference& p = of(preference);
  uint32_t schemes = 0;
  return assign(attribute, value, bytes,
                {{CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, p.workspace_bytes},
                 {CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, schemes},
                 {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, p.align_a},
                 {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, p.align_b},
                 {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, p.align_c},
                 {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, p.align_d}});
}
cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t handle, cublasLtMatmulDesc_t desc,
                                              cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                                              cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
                                              cublasLtMatmulPreference_t preference, int requested,
                                              cublasLtMatmulHeuristicResult_t found[], int* count) {
  *count = 0;
  if (handle == nullptr) return CUBLAS_STATUS_NOT_INITIALIZED;
  if (requested < 1) return CUBLAS_STATUS_INVALID_VALUE;
  const LtProblem problem{of(desc), of(a), of(b), of(c), of(d)};
  if (const cublasStatus_t status = examine_product(problem); status != CUBLAS_STATUS_SUCCESS) return status;
  *count = std::min(requested, 10);  // equal algorithms
  found[0] = {};
  found[0].algo = gradwire::simt::describe_algorithm(problem, of(preference));
  found[0].workspaceSize = of(preference).workspace_bytes;
  found[0].state = CUBLAS_STATUS_SUCCESS;
  std::fill_n(found, *count, found[0]);
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulAlgoCheck(cublasLtHandle_t handle, cublasLtMatmulDesc_t desc,
                                       cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                                       cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
                                       const cublasLtMatmulAlgo_t* algorithm,
                                       cublasLtMatmulHeuristicResult_t* result) {
  if (handle == nullptr) return CUBLAS_STATUS_NOT_INITIALIZED;
  const LtProblem problem{of(desc), of(a), of(b), of(c), of(d)};
  if (const cublasStatus_t status = examine_product(problem); status != CUBLAS_STATUS_SUCCESS) return status;
  const cublasStatus_t status = gradwire::simt::examine_algorithm(problem, *algorithm);
  result->state = status;
  result->workspaceSize = gradwire::simt::workspace_of(*algorithm);
  return status;
}
// Computes a product. Stricter than the library: requires an algorithm, and a product in place.
cublasStatus_t cublasLtMatmul(cublasLtHandle_t handle, cublasLtMatmulDesc_t desc, const void* alpha,
                              const void* a, cublasLtMatrixLayout_t layout_a, const void* b,
                              cublasLtMatrixLayout_t layout_b, const void* beta, const void* c,
                              cublasLtMatrixLayout_t layout_c, void* d, cublasLtMatrixLayout_t layout_d,
                              const cublasLtMatmulAlgo_t* algorithm, void* workspace, size_t workspace_bytes,
                              cudaStream_t stream) {
  if (handle == nullptr) return CUBLAS_STATUS_NOT_INITIALIZED;
  const Operation& o = of(desc);
  const Layout &la = of(layout_a), &lb = of(layout_b), &ld = of(layout_d);
  const LtProblem problem{o, la, lb, of(layout_c), ld};
  if (alpha == nullptr || beta == nullptr || algorithm == nullptr || c != d)
    return CUBLAS_STATUS_INVALID_VALUE;
  for (const cublasStatus_t status :
       {examine_product(problem), gradwire::simt::examine_algorithm(problem, *algorithm),
        gradwire::simt::examine_pointers(problem, {a, b, c, d, workspace, workspace_bytes}, *algorithm)}) {
    if (status != CUBLAS_STATUS_SUCCESS) return status;
  }
  const bool ta = o.a != CUBLAS_OP_N, tb = o.b != CUBLAS_OP_N;
  const Product p{ta,
                  tb,
                  static_cast<int64_t>(ld.rows),
                  static_cast<int64_t>(ld.columns),
                  static_cast<int64_t>(ta ? la.rows : la.columns),
                  a,
                  la,
                  b,
                  lb,
                  d,
                  ld,
                  *static_cast<const float*>(alpha),
                  *static_cast<const float*>(beta)};
  return enqueue("cublasLtMatmul", stream, {a, b, d, o.bias, o.aux, workspace}, [p, o] {
    for (int64_t index = 0; index < p.ld.batch; ++index) {
      multiply(p, index, [&](double x, int64_t row, int64_t column) {
        if (o.bias != nullptr) x += get(o.bias, p.ld.type, index * o.bias_stride + row);
        const int64_t at = index * o.aux_stride + column * o.aux_ld + row;
        if (o.epilogue == CUBLASLT_EPILOGUE_DGELU) return x * gelu_derivative(get(o.aux, p.ld.type, at));
        if (!o.is_gelu()) return x;
        if (o.aux != nullptr) put(o.aux, p.ld.type, at, x);
        return gelu(x);
      });
    }
  });
}
size_t cublasLtGetVersion() {
  return 0;
}

cublasStatus_t cublasCreate_v2(cublasHandle_t* handle) {
  *handle = reinterpret_cast<cublasHandle_t>(new Handle);
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasDestroy_v2(cublasHandle_t handle) {
  delete reinterpret_cast<Handle*>(handle);
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasSetStream_v2(cublasHandle_t handle, cudaStream_t stream) {
  reinterpret_cast<Handle*>(handle)->stream = stream;
  return CUBLAS_STATUS_SUCCESS;
}
// Checks the workspace's alignment. The documentation says "aligned to at least 256 bytes".
cublasStatus_t cublasSetWorkspace_v2(cublasHandle_t, void* workspace, size_t) {
  return gradwire::simt::is_aligned(workspace, 256) ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_INVALID_VALUE;
}
cublasStatus_t cublasSetMathMode(cublasHandle_t, cublasMath_t) {
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasGemmStridedBatchedEx(cublasHandle_t handle, cublasOperation_t ta, cublasOperation_t tb,
                                          int m, int n, int k, const void* alpha, const void* a,
                                          cudaDataType type_a, int lda, long long stride_a, const void* b,
                                          cudaDataType type_b, int ldb, long long stride_b, const void* beta,
                                          void* c, cudaDataType type_c, int ldc, long long stride_c,
                                          int batch, cublasComputeType_t compute, cublasGemmAlgo_t) {
  if (handle == nullptr) return CUBLAS_STATUS_NOT_INITIALIZED;
  if (m < 0 || n < 0 || k < 0 || batch < 0 || alpha == nullptr || beta == nullptr || c == nullptr)
    return CUBLAS_STATUS_INVALID_VALUE;
  const bool transpose_a = ta != CUBLAS_OP_N, transpose_b = tb != CUBLAS_OP_N;
  auto layout = [batch](cudaDataType type, int rows, int columns, int ld, int64_t stride) {
    return Layout{type, static_cast<uint64_t>(rows), static_cast<uint64_t>(columns), ld, batch, stride};
  };
  const Layout la = layout(type_a, transpose_a ? k : m, transpose_a ? m : k, lda, stride_a);
  const Layout lb = layout(type_b, transpose_b ? n : k, transpose_b ? k : n, ldb, stride_b);
  const Layout lc = layout(type_c, m, n, ldc, stride_c);
  if (const cublasStatus_t status = gradwire::simt::examine_gemm(la, lb, lc, compute);
      status != CUBLAS_STATUS_SUCCESS)
    return status;
  const Product p{transpose_a,
                  transpose_b,
                  m,
                  n,
                  k,
                  a,
                  la,
                  b,
                  lb,
                  c,
                  lc,
                  *static_cast<const float*>(alpha),
                  *static_cast<const float*>(beta)};
  return enqueue("cublasGemmStridedBatchedEx", reinterpret_cast<Handle*>(handle)->stream, {a, b, c},
                 [p, batch] {
                   for (int index = 0; index < batch; ++index)
                     multiply(p, index, [](double x, int64_t, int64_t) { return x; });
                 });
}
cublasStatus_t cublasGetProperty(libraryPropertyType, int* value) {
  *value = 0;
  return CUBLAS_STATUS_SUCCESS;
}
const char* cublasGetStatusName(cublasStatus_t) {
  return "a status of the stand-in";
}
const char* cublasGetStatusString(cublasStatus_t) {
  return "tests/simt/cublas_stand_in.cpp";
}

#ifndef GRADWIRE_STANDIN  // tests/standin defines these functions itself
cudaError_t cudaMalloc(void** pointer, size_t bytes) {
  *pointer = std::aligned_alloc(256, (bytes + 255) / 256 * 256);
  return cudaSuccess;
}
cudaError_t cudaFree(void* pointer) {
  std::free(pointer);
  return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t) {
  std::memcpy(to, from, bytes);
  return cudaSuccess;
}
cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) {
  *value = 8;  // compute capability 8.x, for which the workspace is smaller
  return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int) {
  *properties = {};
  return cudaSuccess;
}
cudaError_t cudaGetLastError() {
  return cudaSuccess;
}
const char* cudaGetErrorName(cudaError_t) {
  return "an error of the stand-in";
}
const char* cudaGetErrorString(cudaError_t) {
  return "tests/simt/cublas_stand_in.cpp";
}
// Reports an active capture. Called only with GRADWIRE_TUNING.
cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  *status = cudaStreamCaptureStatusActive;
  return cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t*) {
  return cudaErrorNotSupported;
}
cudaError_t cudaEventDestroy(cudaEvent_t) {
  return cudaErrorNotSupported;
}
cudaError_t cudaEventRecord(cudaEvent_t, cudaStream_t) {
  return cudaErrorNotSupported;
}
cudaError_t cudaEventSynchronize(cudaEvent_t) {
  return cudaErrorNotSupported;
}
cudaError_t cudaEventElapsedTime(float*, cudaEvent_t, cudaEvent_t) {
  return cudaErrorNotSupported;
}
cudaError_t cudaStreamBeginCapture(cudaStream_t, cudaStreamCaptureMode) {
  return cudaErrorNotSupported;
}
cudaError_t cudaStreamEndCapture(cudaStream_t, cudaGraph_t*) {
  return cudaErrorNotSupported;
}
cudaError_t cudaMemsetAsync(void*, int, size_t, cudaStream_t) {
  return cudaErrorNotSupported;
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t*, cudaGraph_t, unsigned long long) {
  return cudaErrorNotSupported;
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t, cudaStream_t) {
  return cudaErrorNotSupported;
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t) {
  return cudaErrorNotSupported;
}
cudaError_t cudaGraphDestroy(cudaGraph_t) {
  return cudaErrorNotSupported;
}
#endif

}  // extern "C"
