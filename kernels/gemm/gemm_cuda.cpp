// Single products on cuBLASLt, batches on cuBLAS.
//
// cuBLASLt is asked for its best algorithm once per kind of product (shape, types, layout, bias,
// alignment). The answer is kept with the descriptors, so that from then on a product is one library call,
// without allocation or synchronization, which a CUDA graph can capture. Split products add their parts in
// FP32, and in a fixed order.
//
// A cuBLAS handle must not be used by two threads at once, and gives repeatable bits only with a stream and a
// workspace that it does not share. So each thread keeps one handle per (device, stream), with its own
// workspace, made at the first product there; a CUDA graph is therefore captured after one plain run. FP32
// products never use TF32 unless asked to.
#include <cublasLt.h>
#include <cublas_v2.h>
#include <cuda_runtime_api.h>
#include <fmt/core.h>

#include <algorithm>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>

#include "kernels/gemm/column_major_gemm.h"
#include "kernels/gemm/gemm.h"
#include "runtime/cuda_check.h"

namespace gradwire::cuda {
namespace {

void check_cublas(cublasStatus_t status, const char* call) {
  if (status != CUBLAS_STATUS_SUCCESS) {
    throw DeviceError(
        fmt::format("{}: {}: {}", call, cublasGetStatusName(status), cublasGetStatusString(status)));
  }
}
#define GW_CUBLAS_CHECK(call) check_cublas((call), #call)

cudaDataType_t cuda_type(Element type) {
  return type == Element::bf16 ? CUDA_R_16BF : CUDA_R_32F;
}

cublasComputeType_t compute_type(Precision precision) {
  return precision == Precision::tf32 ? CUBLAS_COMPUTE_32F_FAST_TF32 : CUBLAS_COMPUTE_32F;
}

// Owns one of cuBLASLt's descriptors.
template <typename T, cublasStatus_t (*kDestroy)(T)>
class Owned {
 public:
  Owned() = default;
  Owned(Owned&& other) noexcept : value_(std::exchange(other.value_, nullptr)) {}
  Owned& operator=(Owned&& other) noexcept {
    std::swap(value_, other.value_);
    return *this;
  }
  ~Owned() {
    if (value_ != nullptr) kDestroy(value_);
  }
  T* out() { return &value_; }
  T get() const { return value_; }

 private:
  T value_ = nullptr;
};
using Operation = Owned<cublasLtMatmulDesc_t, cublasLtMatmulDescDestroy>;
using Layout = Owned<cublasLtMatrixLayout_t, cublasLtMatrixLayoutDestroy>;
using Preference = Owned<cublasLtMatmulPreference_t, cublasLtMatmulPreferenceDestroy>;

// The largest power of two, up to 256, that divides the address: what an algorithm may rely on.
uint32_t alignment_of(const void* pointer) {
  const auto address = reinterpret_cast<uintptr_t>(pointer) | 256u;
  return static_cast<uint32_t>(address & (~address + 1));
}

// A kind of product and how cuBLASLt does it.
class Plan {
 public:
  // Finds an algorithm, or none: then usable() is false.
  Plan(cublasLtHandle_t lt, size_t workspace_bytes, const ColumnMajorGemm& g, Precision precision) {
    GW_CUBLAS_CHECK(cublasLtMatmulDescCreate(operation_.out(), compute_type(precision), CUDA_R_32F));
    const cublasOperation_t op_a = g.transpose_a ? CUBLAS_OP_T : CUBLAS_OP_N;
    const cublasOperation_t op_b = g.transpose_b ? CUBLAS_OP_T : CUBLAS_OP_N;
    set(CUBLASLT_MATMUL_DESC_TRANSA, op_a);
    set(CUBLASLT_MATMUL_DESC_TRANSB, op_b);
    if (g.bias != nullptr) {
      set(CUBLASLT_MATMUL_DESC_EPILOGUE, CUBLASLT_EPILOGUE_BIAS);
      set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, g.bias);
      set(CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, static_cast<int32_t>(cuda_type(g.d.type)));
    }
    lay_out(a_, g.a);
    lay_out(b_, g.b);
    lay_out(d_, g.d);
    Preference preference;
    GW_CUBLAS_CHECK(cublasLtMatmulPreferenceCreate(preference.out()));
    auto prefer = [&](cublasLtMatmulPreferenceAttributes_t attribute, const auto& value) {
      GW_CUBLAS_CHECK(
          cublasLtMatmulPreferenceSetAttribute(preference.get(), attribute, &value, sizeof value));
    };
    prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, static_cast<uint64_t>(workspace_bytes));
    // Parts of a split product must not be rounded to BF16 before they are added.
    prefer(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
           static_cast<uint32_t>(CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE));
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, alignment_of(g.a.data));
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, alignment_of(g.b.data));
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, alignment_of(g.d.data));
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, alignment_of(g.d.data));
    cublasLtMatmulHeuristicResult_t found = {};
    int count = 0;
    const cublasStatus_t status = cublasLtMatmulAlgoGetHeuristic(
        lt, operation_.get(), a_.get(), b_.get(), d_.get(), d_.get(), preference.get(), 1, &found, &count);
    if (status == CUBLAS_STATUS_NOT_SUPPORTED || (status == CUBLAS_STATUS_SUCCESS && count == 0)) return;
    GW_CUBLAS_CHECK(status);
    if (found.state == CUBLAS_STATUS_SUCCESS) algorithm_ = found.algo;
  }

  bool usable() const { return algorithm_.has_value(); }

  void run(cublasLtHandle_t lt, const ColumnMajorGemm& g, float alpha, float beta, void* workspace,
           size_t workspace_bytes, CudaStream stream) {
    if (g.bias != nullptr) set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, g.bias);
    void* d = const_cast<void*>(g.d.data);  // a Gemm's c, which is not const
    GW_CUBLAS_CHECK(cublasLtMatmul(lt, operation_.get(), &alpha, g.a.data, a_.get(), g.b.data, b_.get(),
                                   &beta, d, d_.get(), d, d_.get(), &*algorithm_, workspace, workspace_bytes,
                                   stream));
  }

 private:
  template <typename T>
  void set(cublasLtMatmulDescAttributes_t attribute, const T& value) {
    GW_CUBLAS_CHECK(cublasLtMatmulDescSetAttribute(operation_.get(), attribute, &value, sizeof value));
  }
  static void lay_out(Layout& layout, const ColumnMajorMatrix& m) {
    GW_CUBLAS_CHECK(cublasLtMatrixLayoutCreate(layout.out(), cuda_type(m.type), static_cast<uint64_t>(m.rows),
                                               static_cast<uint64_t>(m.columns), m.ld));
  }

  Operation operation_;
  Layout a_, b_, d_;
  std::optional<cublasLtMatmulAlgo_t> algorithm_;
};

// What decides a plan.
using PlanKey = std::tuple<bool, bool, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, Element, Element,
                           Precision, bool, uint32_t, uint32_t, uint32_t, uint32_t>;
PlanKey key_of(const Gemm& g) {
  return {g.transpose_a,
          g.transpose_b,
          g.m,
          g.n,
          g.k,
          g.lda,
          g.ldb,
          g.ldc,
          g.a.type,
          g.c.type,
          g.precision,
          g.bias.data != nullptr,
          alignment_of(g.a.data),
          alignment_of(g.b.data),
          alignment_of(g.c.data),
          alignment_of(g.bias.data)};
}

// One thread's products on one stream.
class Context {
 public:
  Context(int device, CudaStream stream) : stream_(stream) {
    GW_CUBLAS_CHECK(cublasCreate(&handle_));
    GW_CUBLAS_CHECK(cublasSetStream(handle_, stream));
    int major = 0;
    GW_CUDA_CHECK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
    workspace_bytes_ = size_t{major >= 9 ? 32u : 4u} << 20;  // what NVIDIA's documentation recommends
    GW_CUDA_CHECK(cudaMalloc(&workspace_, workspace_bytes_));
    GW_CUBLAS_CHECK(cublasSetWorkspace(handle_, workspace_, workspace_bytes_));
    GW_CUBLAS_CHECK(cublasSetMathMode(
        handle_,
        static_cast<cublasMath_t>(CUBLAS_DEFAULT_MATH | CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION)));
  }
  ~Context() {
    // At thread exit, perhaps after the driver has shut down: a failure cannot be handled.
    plans_.clear();
    cublasDestroy(handle_);
    cudaFree(workspace_);
  }
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;

  // False when cuBLASLt has no algorithm for it.
  bool single(const Gemm& g) {
    // A cuBLAS handle holds a cuBLASLt one and may be used as such.
    const auto lt = reinterpret_cast<cublasLtHandle_t>(handle_);
    const ColumnMajorGemm call = column_major(g);
    auto at = plans_.find(key_of(g));
    if (at == plans_.end()) {
      at = plans_.emplace(key_of(g), std::make_unique<Plan>(lt, workspace_bytes_, call, g.precision)).first;
    }
    if (!at->second->usable()) return false;
    at->second->run(lt, call, g.alpha, g.beta, workspace_, workspace_bytes_, stream_);
    return true;
  }

  // cuBLAS is column-major, too: kernels/gemm/column_major_gemm.h.
  void batch(const Gemm& g) {
    auto distance = [](int64_t ld) { return static_cast<int>(std::max<int64_t>(1, ld)); };
    GW_CUBLAS_CHECK(cublasGemmStridedBatchedEx(
        handle_, g.transpose_b ? CUBLAS_OP_T : CUBLAS_OP_N, g.transpose_a ? CUBLAS_OP_T : CUBLAS_OP_N,
        static_cast<int>(g.n), static_cast<int>(g.m), static_cast<int>(g.k), &g.alpha, g.b.data,
        cuda_type(g.b.type), distance(g.ldb), g.stride_b, g.a.data, cuda_type(g.a.type), distance(g.lda),
        g.stride_a, &g.beta, g.c.data, cuda_type(g.c.type), distance(g.ldc), g.stride_c,
        static_cast<int>(g.batch), compute_type(g.precision), CUBLAS_GEMM_DEFAULT));
  }

 private:
  CudaStream stream_;
  cublasHandle_t handle_ = nullptr;
  void* workspace_ = nullptr;
  size_t workspace_bytes_ = 0;
  std::map<PlanKey, std::unique_ptr<Plan>> plans_;
};

Context& context_for(CudaStream stream) {
  thread_local std::map<std::pair<int, CudaStream>, std::unique_ptr<Context>> contexts;
  int device = 0;
  GW_CUDA_CHECK(cudaGetDevice(&device));
  auto& context = contexts[{device, stream}];
  if (!context) context = std::make_unique<Context>(device, stream);
  return *context;
}

}  // namespace

void gemm(CudaStream stream, const Gemm& g) {
  detail::check(g);
  if (g.m == 0 || g.n == 0 || g.batch == 0) return;
  Context& context = context_for(stream);
  if (g.batch == 1 && g.k > 0 && context.single(g)) return;
  if (g.bias.data != nullptr) throw DeviceError("gemm: cuBLASLt cannot add a bias to this product");
  context.batch(g);
}

}  // namespace gradwire::cuda
