// A stand-in for cuBLAS, cuBLASLt and the few calls of CUDA's runtime in kernels/gemm/gemm_cuda.cpp. It
// computes on the host, in double, according to their documentation. It stores descriptors, so it detects
// missing and invalid settings, and it rejects calls that the documentation excludes. Only a GPU can tell
// which calls the library really supports.
#include "tests/simt/cublas_stand_in.h"

#include <cublasLt.h>
#include <cublas_v2.h>
#include <cuda_runtime_api.h>

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <utility>
#include <vector>

#include "kernels/math/bf16.h"
#ifdef GRADWIRE_STANDIN
#include "tests/standin/launch.h"
#endif

namespace {

using gradwire::Bf16;

bool refuses_gelu = false, refuses_bias = false;

struct Operation {
  cublasOperation_t a = CUBLAS_OP_N, b = CUBLAS_OP_N;
  uint32_t epilogue = CUBLASLT_EPILOGUE_DEFAULT;
  const void* bias = nullptr;
  int32_t bias_type = -1;
  void* aux = nullptr;
  int64_t aux_ld = 0;
};
struct Layout {
  cudaDataType type;
  uint64_t rows, columns;
  int64_t ld;
  int32_t batch = 1;
  int64_t stride = 0;
};
Operation& of(cublasLtMatmulDesc_t desc) {
  return *reinterpret_cast<Operation*>(desc);
}
Layout& of(cublasLtMatrixLayout_t layout) {
  return *reinterpret_cast<Layout*>(layout);
}

template <typename T>
cublasStatus_t assign(T& to, const void* from, size_t bytes) {
  if (bytes != sizeof to) return CUBLAS_STATUS_INVALID_VALUE;
  std::memcpy(&to, from, bytes);
  return CUBLAS_STATUS_SUCCESS;
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

bool is_gelu(uint32_t epilogue) {
  return (epilogue & (CUBLASLT_EPILOGUE_GELU | 64)) != 0;  // 64: DGELU without its aux bit
}
bool has_aux(uint32_t epilogue) {
  return (epilogue & 128) != 0;  // of GELU_AUX, GELU_AUX_BIAS and DGELU
}

// One product, column-major: D = alpha op(A) op(B) + beta C, followed by the epilogue.
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
// Returns the elements of a matrix as doubles, row by row: `rows` rows of `inner` elements with strides
// `row_step` and `inner_step`.
std::vector<double> unpack(const void* data, const Layout& layout, int64_t begin, int64_t rows, int64_t inner,
                           int64_t row_step, int64_t inner_step) {
  std::vector<double> all(static_cast<size_t>(rows * inner));
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t k = 0; k < inner; ++k)
      all[static_cast<size_t>(row * inner + k)] =
          get(data, layout.type, begin + row * row_step + k * inner_step);
  }
  return all;
}
// Adds in a few partial sums, which the compiler can keep in vectors.
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
  const std::vector<double> a = unpack(p.a, p.la, index * p.la.stride, p.rows, p.inner,
                                       p.transpose_a ? p.la.ld : 1, p.transpose_a ? 1 : p.la.ld);
  const std::vector<double> b = unpack(p.b, p.lb, index * p.lb.stride, p.columns, p.inner,
                                       p.transpose_b ? 1 : p.lb.ld, p.transpose_b ? p.lb.ld : 1);
  for (int64_t column = 0; column < p.columns; ++column) {
    for (int64_t row = 0; row < p.rows; ++row) {
      const int64_t at = index * p.ld.stride + column * p.ld.ld + row;
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
                       std::function<void()> product) {
#ifdef GRADWIRE_STANDIN
  const int status = gradwire::standin::enqueue_library_call(name, stream, std::move(product));
  return status == cudaSuccess ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_EXECUTION_FAILED;
#else
  product();
  return CUBLAS_STATUS_SUCCESS;
#endif
}

// Checks a call against the documentation. Returns NOT_SUPPORTED where there would be no algorithm.
cublasStatus_t examine(const Operation& o, const Layout& a, const Layout& b, const Layout& d) {
  const bool ta = o.a != CUBLAS_OP_N, tb = o.b != CUBLAS_OP_N;
  if ((ta ? a.columns : a.rows) != d.rows || (tb ? b.rows : b.columns) != d.columns ||
      (ta ? a.rows : a.columns) != (tb ? b.columns : b.rows) || a.batch != d.batch || b.batch != d.batch)
    return CUBLAS_STATUS_INVALID_VALUE;
  const bool with_bias = (o.epilogue & CUBLASLT_EPILOGUE_BIAS) != 0;
  if (with_bias != (o.bias != nullptr) || (with_bias && o.bias_type != d.type))
    return CUBLAS_STATUS_INVALID_VALUE;
  if (with_bias && refuses_bias) return CUBLAS_STATUS_NOT_SUPPORTED;
  if (has_aux(o.epilogue) != (o.aux != nullptr)) return CUBLAS_STATUS_INVALID_VALUE;
  if (!is_gelu(o.epilogue)) return CUBLAS_STATUS_SUCCESS;
  if (d.batch != 1) return CUBLAS_STATUS_INVALID_VALUE;
  if (o.aux != nullptr && (o.aux_ld % 8 != 0 || o.aux_ld < static_cast<int64_t>(d.rows)))
    return CUBLAS_STATUS_INVALID_VALUE;
  return refuses_gelu ? CUBLAS_STATUS_NOT_SUPPORTED : CUBLAS_STATUS_SUCCESS;
}

}  // namespace

void gradwire::simt::refuse_gelu_epilogues(bool refuses) {
  refuses_gelu = refuses;
}
void gradwire::simt::refuse_biases(bool refuses) {
  refuses_bias = refuses;
}

extern "C" {

cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t* desc, cublasComputeType_t, cudaDataType_t) {
  *desc = reinterpret_cast<cublasLtMatmulDesc_t>(new Operation);
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
  switch (attribute) {
    case CUBLASLT_MATMUL_DESC_TRANSA:
      return assign(o.a, value, bytes);
    case CUBLASLT_MATMUL_DESC_TRANSB:
      return assign(o.b, value, bytes);
    case CUBLASLT_MATMUL_DESC_EPILOGUE:
      return assign(o.epilogue, value, bytes);
    case CUBLASLT_MATMUL_DESC_BIAS_POINTER:
      return assign(o.bias, value, bytes);
    case CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE:
      return assign(o.bias_type, value, bytes);
    case CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER:
      return assign(o.aux, value, bytes);
    case CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD:
      return assign(o.aux_ld, value, bytes);
    default:
      return CUBLAS_STATUS_INVALID_VALUE;
  }
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
  if (attribute == CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT) return assign(of(layout).batch, value, bytes);
  if (attribute == CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET)
    return assign(of(layout).stride, value, bytes);
  return CUBLAS_STATUS_INVALID_VALUE;
}
cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t* preference) {
  *preference = reinterpret_cast<cublasLtMatmulPreference_t>(new char);
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t preference) {
  delete reinterpret_cast<char*>(preference);
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t,
                                                    cublasLtMatmulPreferenceAttributes_t, const void*,
                                                    size_t) {
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t, cublasLtMatmulDesc_t desc,
                                              cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                                              cublasLtMatrixLayout_t, cublasLtMatrixLayout_t d,
                                              cublasLtMatmulPreference_t, int,
                                              cublasLtMatmulHeuristicResult_t found[], int* count) {
  const cublasStatus_t status = examine(of(desc), of(a), of(b), of(d));
  *count = status == CUBLAS_STATUS_SUCCESS ? 1 : 0;
  if (*count > 0) found[0].state = CUBLAS_STATUS_SUCCESS;
  return status;
}
cublasStatus_t cublasLtMatmulAlgoCheck(cublasLtHandle_t, cublasLtMatmulDesc_t, cublasLtMatrixLayout_t,
                                       cublasLtMatrixLayout_t, cublasLtMatrixLayout_t, cublasLtMatrixLayout_t,
                                       const cublasLtMatmulAlgo_t*, cublasLtMatmulHeuristicResult_t*) {
  return CUBLAS_STATUS_NOT_SUPPORTED;
}
cublasStatus_t cublasLtMatmul(cublasLtHandle_t, cublasLtMatmulDesc_t desc, const void* alpha, const void* a,
                              cublasLtMatrixLayout_t layout_a, const void* b, cublasLtMatrixLayout_t layout_b,
                              const void* beta, const void* c, cublasLtMatrixLayout_t, void* d,
                              cublasLtMatrixLayout_t layout_d, const cublasLtMatmulAlgo_t* algorithm, void*,
                              size_t, cudaStream_t stream) {
  const Operation& o = of(desc);
  const Layout &la = of(layout_a), &lb = of(layout_b), &ld = of(layout_d);
  if (algorithm == nullptr || c != d) return CUBLAS_STATUS_INVALID_VALUE;
  if (const cublasStatus_t status = examine(o, la, lb, ld); status != CUBLAS_STATUS_SUCCESS) return status;
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
  return enqueue("cublasLtMatmul", stream, [p, o] {
    for (int64_t index = 0; index < p.ld.batch; ++index) {
      multiply(p, index, [&](double x, int64_t row, int64_t column) {
        if (o.bias != nullptr) x += get(o.bias, p.ld.type, row);
        const int64_t at = column * o.aux_ld + row;
        if (o.epilogue == CUBLASLT_EPILOGUE_DGELU) return x * gelu_derivative(get(o.aux, p.ld.type, at));
        if (!is_gelu(o.epilogue)) return x;
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
cublasStatus_t cublasSetWorkspace_v2(cublasHandle_t, void*, size_t) {
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasSetMathMode(cublasHandle_t, cublasMath_t) {
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasGemmStridedBatchedEx(cublasHandle_t handle, cublasOperation_t ta, cublasOperation_t tb,
                                          int m, int n, int k, const void* alpha, const void* a,
                                          cudaDataType type_a, int lda, long long stride_a, const void* b,
                                          cudaDataType type_b, int ldb, long long stride_b, const void* beta,
                                          void* c, cudaDataType type_c, int ldc, long long stride_c,
                                          int batch, cublasComputeType_t, cublasGemmAlgo_t) {
  const Product p{ta != CUBLAS_OP_N,
                  tb != CUBLAS_OP_N,
                  m,
                  n,
                  k,
                  a,
                  {type_a, 0, 0, lda, batch, stride_a},
                  b,
                  {type_b, 0, 0, ldb, batch, stride_b},
                  c,
                  {type_c, 0, 0, ldc, batch, stride_c},
                  *static_cast<const float*>(alpha),
                  *static_cast<const float*>(beta)};
  return enqueue("cublasGemmStridedBatchedEx", reinterpret_cast<Handle*>(handle)->stream, [p, batch] {
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

#ifndef GRADWIRE_STANDIN  // which defines these functions itself
cudaError_t cudaMalloc(void** pointer, size_t bytes) {
  *pointer = std::malloc(bytes);
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
  *value = 8;  // compute capability 8.x: the smaller workspace
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
// Called only for GRADWIRE_TUNING.
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
#endif

}  // extern "C"
