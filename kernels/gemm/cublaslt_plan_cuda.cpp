#include "kernels/gemm/cublaslt_plan.h"

#include <cuda_runtime_api.h>
#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <limits>
#include <memory>
#include <string>

#include "runtime/device/cuda_check.h"

namespace gradwire::cuda {

void check_cublas(cublasStatus_t status, const char* call) {
  if (status == CUBLAS_STATUS_SUCCESS) return;
  const std::string text =
      fmt::format("{}: {}: {}", call, cublasGetStatusName(status), cublasGetStatusString(status));
  if (status == CUBLAS_STATUS_ALLOC_FAILED) throw OutOfResources(text);
  throw DeviceError(text);
}

// Returns the largest power of two, up to 256, that divides the address: the alignment that an algorithm may
// assume.
uint32_t alignment_of(const void* pointer) {
  const auto address = reinterpret_cast<uintptr_t>(pointer) | 256u;
  return static_cast<uint32_t>(address & (~address + 1));
}
// Returns the alignment that all matrices of a batch have.
uint32_t alignment_of(const void* pointer, int64_t stride, Element type, int64_t batch) {
  const auto between = static_cast<uintptr_t>(batch > 1 ? stride * element_bytes(type) : 0);
  return alignment_of(reinterpret_cast<const void*>(reinterpret_cast<uintptr_t>(pointer) | between));
}

namespace {

constexpr int kMostTimed = 12;

class CudaMemory {
 public:
  // Allocates device memory; get() is null if there is not enough.
  explicit CudaMemory(size_t bytes) {
    const cudaError_t status = cudaMalloc(&data_, bytes);
    if (status == cudaErrorMemoryAllocation) {
      cudaGetLastError();  // clear the sticky error
      data_ = nullptr;
      return;
    }
    check(status, "cudaMalloc");
  }
  ~CudaMemory() { ignore(cudaFree(data_)); }
  CudaMemory(const CudaMemory&) = delete;
  CudaMemory& operator=(const CudaMemory&) = delete;
  void* get() const { return data_; }

 private:
  void* data_ = nullptr;
};

// Returns the milliseconds that several runs take: the least of a few measurements. The first run is not
// counted.
template <typename Run>
float time_ms(const Run& run, CudaStream stream) {
  constexpr int kTimes = 3, kRuns = 8;
  const auto make_event = [] {
    cudaEvent_t event = nullptr;
    GW_CUDA_CHECK(cudaEventCreate(&event));
    return std::unique_ptr<CUevent_st, void (*)(cudaEvent_t)>(
        event, [](cudaEvent_t e) { ignore(cudaEventDestroy(e)); });
  };
  const auto begin = make_event(), end = make_event();
  run();
  float best = std::numeric_limits<float>::infinity();
  for (int time = 0; time < kTimes; ++time) {
    GW_CUDA_CHECK(cudaEventRecord(begin.get(), stream));
    for (int i = 0; i < kRuns; ++i) run();
    GW_CUDA_CHECK(cudaEventRecord(end.get(), stream));
    GW_CUDA_CHECK(cudaEventSynchronize(end.get()));
    float ms = 0.0f;
    GW_CUDA_CHECK(cudaEventElapsedTime(&ms, begin.get(), end.get()));
    best = std::min(best, ms);
  }
  return best;
}

cublasLtEpilogue_t epilogue_of(const ColumnMajorGemm& g) {
  const bool bias = g.bias != nullptr;
  switch (g.epilogue) {
    case Epilogue::gelu_tanh:
      if (g.aux == nullptr) return bias ? CUBLASLT_EPILOGUE_GELU_BIAS : CUBLASLT_EPILOGUE_GELU;
      return bias ? CUBLASLT_EPILOGUE_GELU_AUX_BIAS : CUBLASLT_EPILOGUE_GELU_AUX;
    case Epilogue::d_gelu_tanh:
      return CUBLASLT_EPILOGUE_DGELU;
    case Epilogue::none:
      break;
  }
  return bias ? CUBLASLT_EPILOGUE_BIAS : CUBLASLT_EPILOGUE_DEFAULT;
}

void lay_out(Layout& layout, const ColumnMajorMatrix& m, int64_t batch) {
  GW_CUBLAS_CHECK(cublasLtMatrixLayoutCreate(layout.out(), cuda_type(m.type), static_cast<uint64_t>(m.rows),
                                             static_cast<uint64_t>(m.columns), m.ld));
  if (batch == 1) return;
  auto set = [&](cublasLtMatrixLayoutAttribute_t attribute, const auto& value) {
    GW_CUBLAS_CHECK(cublasLtMatrixLayoutSetAttribute(layout.get(), attribute, &value, sizeof value));
  };
  set(CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, static_cast<int32_t>(batch));
  set(CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, m.stride);
}

}  // namespace

Plan::Plan(const LtContext& context, const ColumnMajorGemm& g, Precision precision, const Tuning* tuning) {
  describe(g, precision);
  const Preference preference = preference_for(g, context.workspace_bytes);
  const bool times = tuning != nullptr;
  std::array<cublasLtMatmulHeuristicResult_t, kMostTimed> found = {};
  int count = 0;
  const cublasStatus_t status =
      cublasLtMatmulAlgoGetHeuristic(context.lt, operation_.get(), a_.get(), b_.get(), d_.get(), d_.get(),
                                     preference.get(), times ? kMostTimed : 1, found.data(), &count);
  if (status == CUBLAS_STATUS_NOT_SUPPORTED || (status == CUBLAS_STATUS_SUCCESS && count == 0)) return;
  check_cublas(status, "cublasLtMatmulAlgoGetHeuristic");
  if (found[0].state == CUBLAS_STATUS_SUCCESS) algorithm_ = found[0].algo;
  if (times) choose(context, g, *tuning, {found.data(), static_cast<size_t>(count)});
}

void Plan::describe(const ColumnMajorGemm& g, Precision precision) {
  GW_CUBLAS_CHECK(cublasLtMatmulDescCreate(operation_.out(), compute_type(precision), CUDA_R_32F));
  const cublasOperation_t op_a = g.transpose_a ? CUBLAS_OP_T : CUBLAS_OP_N;
  const cublasOperation_t op_b = g.transpose_b ? CUBLAS_OP_T : CUBLAS_OP_N;
  set(CUBLASLT_MATMUL_DESC_TRANSA, op_a);
  set(CUBLASLT_MATMUL_DESC_TRANSB, op_b);
  if (const cublasLtEpilogue_t epilogue = epilogue_of(g); epilogue != CUBLASLT_EPILOGUE_DEFAULT)
    set(CUBLASLT_MATMUL_DESC_EPILOGUE, epilogue);
  if (g.aux != nullptr) {  // D's type is the default
    set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, g.aux);
    set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, g.d.ld);
  }
  if (g.bias != nullptr) {
    set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, g.bias);
    set(CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, static_cast<int32_t>(cuda_type(g.d.type)));
  }
  lay_out(a_, g.a, g.batch);
  lay_out(b_, g.b, g.batch);
  lay_out(d_, g.d, g.batch);
}

Preference Plan::preference_for(const ColumnMajorGemm& g, size_t workspace_bytes) const {
  Preference preference;
  GW_CUBLAS_CHECK(cublasLtMatmulPreferenceCreate(preference.out()));
  auto prefer = [&](cublasLtMatmulPreferenceAttributes_t attribute, const auto& value) {
    GW_CUBLAS_CHECK(cublasLtMatmulPreferenceSetAttribute(preference.get(), attribute, &value, sizeof value));
  };
  prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, static_cast<uint64_t>(workspace_bytes));
  // Parts of a split product must not be rounded to BF16 before they are added.
  prefer(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
         static_cast<uint32_t>(CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE));
  auto aligned = [&](const ColumnMajorMatrix& m) { return alignment_of(m.data, m.stride, m.type, g.batch); };
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, aligned(g.a));
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, aligned(g.b));
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, aligned(g.d));
  // The pointers above determine the alignment of the bias and the pre-activations.
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, aligned(g.d));
  return preference;
}

void Plan::run(const LtContext& context, const ColumnMajorGemm& g, float alpha, float beta) {
  if (g.bias != nullptr) set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, g.bias);
  if (g.aux != nullptr) set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, g.aux);
  void* d = const_cast<void*>(g.d.data);  // a Gemm's c is mutable
  GW_CUBLAS_CHECK(cublasLtMatmul(context.lt, operation_.get(), &alpha, g.a.data, a_.get(), g.b.data, b_.get(),
                                 &beta, d, d_.get(), d, d_.get(), &*algorithm_, context.workspace,
                                 context.workspace_bytes, context.stream));
}

// Returns false if the file has no algorithm for the product, or if this library rejects the saved algorithm.
bool Plan::take_saved(const LtContext& context, const Tuning& tuning) {
  cublasLtMatmulAlgo_t saved = {};
  const auto text = tuning.file->find(tuning.key);
  if (!text || !from_hex_bytes(*text, &saved, sizeof saved)) return false;
  cublasLtMatmulHeuristicResult_t checked = {};
  if (cublasLtMatmulAlgoCheck(context.lt, operation_.get(), a_.get(), b_.get(), d_.get(), d_.get(), &saved,
                              &checked) != CUBLAS_STATUS_SUCCESS ||
      checked.workspaceSize > context.workspace_bytes)
    return false;
  algorithm_ = saved;
  return true;
}

void Plan::choose(const LtContext& context, const ColumnMajorGemm& g, const Tuning& tuning,
                  std::span<const cublasLtMatmulHeuristicResult_t> found) {
  if (take_saved(context, tuning)) return;
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  GW_CUDA_CHECK(cudaStreamIsCapturing(context.stream, &capture));
  if (capture != cudaStreamCaptureStatusNone) return;  // timing is not possible during a capture
  ColumnMajorGemm trial = g;                           // the product may add to the caller's D
  const int64_t elements = (g.batch - 1) * g.d.stride + g.d.ld * g.d.columns;
  const CudaMemory scratch(static_cast<size_t>(elements * element_bytes(g.d.type)));
  if (scratch.get() == nullptr) return;  // use cuBLASLt's first choice
  trial.d.data = scratch.get();
  float best_ms = std::numeric_limits<float>::infinity();
  std::optional<cublasLtMatmulAlgo_t> best;
  for (const auto& candidate : found) {
    if (candidate.state != CUBLAS_STATUS_SUCCESS) continue;
    algorithm_ = candidate.algo;
    const float ms = time_ms([&] { run(context, trial, 1.0f, 0.0f); }, context.stream);
    if (ms < best_ms) best_ms = ms, best = candidate.algo;
  }
  algorithm_ = best;
  if (best) tuning.file->add(tuning.key, hex_bytes(&*best, sizeof *best));
}

}  // namespace gradwire::cuda
