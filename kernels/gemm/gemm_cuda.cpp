// Products and batches of products on cuBLASLt, or on cuBLAS where cuBLASLt has no algorithm.
//
// cuBLASLt selects its best algorithm once per kind of product (shape, types, layout, batch, bias,
// alignment). With GRADWIRE_TUNING, its best few algorithms are timed instead, unless the file names the
// fastest. The choice is kept with the descriptors. Each later product is one library call without allocation
// or synchronization, so a CUDA graph can capture it. Where the library has no algorithm with GELU in the
// product, the plan is a product without it, followed by our kernel. A bias that the library cannot add, for
// example with k = 0, is written to C before the product is added. Split products add their parts in FP32, in
// a fixed order.
//
// Two threads must not share a cuBLAS handle. Repeatable bits need a stream and a workspace that no other
// handle uses. Each thread therefore keeps one handle per (device, stream), with a separate workspace, made
// at the first product on that stream. Therefore a CUDA graph is captured after one plain run. FP32 products
// use TF32 only when requested.
#include <cublasLt.h>
#include <cublas_v2.h>
#include <cuda_runtime_api.h>
#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <limits>
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "kernels/gemm/gemm.h"
#include "kernels/gemm/tuning.h"
#include "runtime/device/device.h"
#include "runtime/device/device_cuda.h"
#include "runtime/threads/thread.h"

namespace gradwire::cuda {
namespace {

// Throws OutOfResources or DeviceError if a call of cuBLAS failed.
void check_cublas(cublasStatus_t status, const char* call) {
  if (status == CUBLAS_STATUS_SUCCESS) return;
  const std::string text =
      fmt::format("{}: {}: {}", call, cublasGetStatusName(status), cublasGetStatusString(status));
  if (status == CUBLAS_STATUS_ALLOC_FAILED) throw OutOfResources(text);
  throw DeviceError(text);
}
#define GW_CUBLAS_CHECK(call) ::gradwire::cuda::check_cublas((call), #call)

cudaDataType_t cuda_type(Element type) {
  return type == Element::bf16 ? CUDA_R_16BF : CUDA_R_32F;
}

cublasComputeType_t compute_type(Precision precision) {
  return precision == Precision::tf32 ? CUBLAS_COMPUTE_32F_FAST_TF32 : CUBLAS_COMPUTE_32F;
}

// Returns the largest power of two, up to 256, that divides the addresses of all matrices of a batch: the
// alignment that an algorithm may assume.
uint32_t alignment_of(const void* pointer, int64_t stride = 0, Element type = Element::fp32,
                      int64_t batch = 1) {
  const auto between = static_cast<uintptr_t>(batch > 1 ? stride * element_bytes(type) : 0);
  const auto address = reinterpret_cast<uintptr_t>(pointer) | between | 256u;
  return static_cast<uint32_t>(address & (~address + 1));
}

// Owns a handle of cuBLAS or of the CUDA runtime. The destructor may run at thread exit, after the driver has
// shut down, so a failure cannot be handled.
template <typename T, auto kDestroy>
class Owned {
 public:
  Owned() = default;
  Owned(Owned&& other) noexcept : value_(std::exchange(other.value_, nullptr)) {}
  Owned& operator=(Owned&& other) noexcept {
    std::swap(value_, other.value_);
    return *this;
  }
  ~Owned() {
    if (value_ == nullptr) return;
    if constexpr (std::is_same_v<decltype(kDestroy(value_)), cudaError_t>)
      ignore(kDestroy(value_));
    else
      kDestroy(value_);
  }
  T* out() { return &value_; }
  T get() const { return value_; }

 private:
  T value_ = nullptr;
};
using Operation = Owned<cublasLtMatmulDesc_t, cublasLtMatmulDescDestroy>;
using Layout = Owned<cublasLtMatrixLayout_t, cublasLtMatrixLayoutDestroy>;
using Preference = Owned<cublasLtMatmulPreference_t, cublasLtMatmulPreferenceDestroy>;
using CudaMemory = Owned<void*, cudaFree>;

// The handle, stream and workspace of a thread's products on a stream.
struct LtContext {
  cublasLtHandle_t lt = nullptr;
  CudaStream stream = nullptr;
  void* workspace = nullptr;
  size_t workspace_bytes = 0;
  size_t cache_bytes = 0;  // size of the device's L2 cache
  std::string device_name = {};
};

// The most algorithms that cuBLASLt is asked for, and how many of them, the fastest of the first round, are
// timed as in a step.
constexpr int kMaxFound = 128, kFinalists = 8;

// Returns the milliseconds that `enqueue` takes on the stream: the least of three runs after a first.
template <typename Enqueue>
float time_ms(const Enqueue& enqueue, CudaStream stream) {
  Owned<cudaEvent_t, cudaEventDestroy> begin, end;
  GW_CUDA_CHECK(cudaEventCreate(begin.out()));
  GW_CUDA_CHECK(cudaEventCreate(end.out()));
  enqueue();
  float best = std::numeric_limits<float>::infinity();
  for (int time = 0; time < 3; ++time) {
    GW_CUDA_CHECK(cudaEventRecord(begin.get(), stream));
    enqueue();
    GW_CUDA_CHECK(cudaEventRecord(end.get(), stream));
    GW_CUDA_CHECK(cudaEventSynchronize(end.get()));
    float ms = 0.0f;
    GW_CUDA_CHECK(cudaEventElapsedTime(&ms, begin.get(), end.get()));
    best = std::min(best, ms);
  }
  return best;
}

// Returns the same for several runs in a CUDA graph, so that the host's launches do not count, each after a
// fill of `memory`, which replaces the contents of the cache: in a step, other ops run between two products.
// The fills take the same time for all algorithms.
template <typename Run>
float time_in_graph_ms(const Run& run, void* memory, size_t bytes, CudaStream stream) {
  constexpr int kRuns = 8;
  GW_CUDA_CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  Owned<cudaGraph_t, cudaGraphDestroy> graph;
  try {
    for (int i = 0; i < kRuns; ++i) {
      GW_CUDA_CHECK(cudaMemsetAsync(memory, 0, bytes, stream));
      run();
    }
  } catch (...) {
    ignore(cudaStreamEndCapture(stream, graph.out()));
    throw;
  }
  GW_CUDA_CHECK(cudaStreamEndCapture(stream, graph.out()));
  Owned<cudaGraphExec_t, cudaGraphExecDestroy> executable;
  GW_CUDA_CHECK(cudaGraphInstantiate(executable.out(), graph.get(), 0));
  return time_ms([&] { GW_CUDA_CHECK(cudaGraphLaunch(executable.get(), stream)); }, stream);
}

// Returns the alignments of a, b, c, the bias and aux; 0: no aux.
std::array<uint32_t, 5> alignments_of(const Gemm& g) {
  return {alignment_of(g.a.data, g.stride_a, g.a.type, g.batch),
          alignment_of(g.b.data, g.stride_b, g.b.type, g.batch),
          alignment_of(g.c.data, g.stride_c, g.c.type, g.batch), alignment_of(g.bias.data),
          g.aux.data == nullptr ? 0 : alignment_of(g.aux.data)};
}

// Returns the kind of product as text, the key in the tuning file.
std::string kind_of(const Gemm& g) {
  auto type = [](Element t) { return t == Element::bf16 ? "bf16" : "fp32"; };
  const auto aligned = alignments_of(g);
  std::string batch;
  if (g.batch > 1)
    batch = fmt::format(" batch={} strides={},{},{}", g.batch, g.stride_a, g.stride_b, g.stride_c);
  std::string epilogue;
  if (g.epilogue != Epilogue::none)
    epilogue = fmt::format(" {} aux={}", g.epilogue == Epilogue::gelu_tanh ? "gelu" : "dgelu", aligned[4]);
  return fmt::format("{}{} m={} n={} k={} lda={} ldb={} ldc={} {}->{}{}{} aligned={},{},{},{}{}{}",
                     g.transpose_a ? 'T' : 'N', g.transpose_b ? 'T' : 'N', g.m, g.n, g.k, g.lda, g.ldb, g.ldc,
                     type(g.a.type), type(g.c.type), g.precision == Precision::tf32 ? " tf32" : "",
                     g.bias.data != nullptr ? " bias" : "", aligned[0], aligned[1], aligned[2], aligned[3],
                     epilogue, batch);
}

cublasLtEpilogue_t epilogue_of(const Gemm& g) {
  const bool bias = g.bias.data != nullptr;
  switch (g.epilogue) {
    case Epilogue::gelu_tanh:
      if (g.aux.data == nullptr) return bias ? CUBLASLT_EPILOGUE_GELU_BIAS : CUBLASLT_EPILOGUE_GELU;
      return bias ? CUBLASLT_EPILOGUE_GELU_AUX_BIAS : CUBLASLT_EPILOGUE_GELU_AUX;
    case Epilogue::d_gelu_tanh:
      return CUBLASLT_EPILOGUE_DGELU;
    case Epilogue::none:
      break;
  }
  return bias ? CUBLASLT_EPILOGUE_BIAS : CUBLASLT_EPILOGUE_DEFAULT;
}

// Describes a row-major matrix, as stored, by its column-major transpose.
void lay_out(Layout& layout, Element type, int64_t rows, int64_t columns, int64_t ld, int64_t stride,
             int64_t batch) {
  GW_CUBLAS_CHECK(cublasLtMatrixLayoutCreate(layout.out(), cuda_type(type), static_cast<uint64_t>(columns),
                                             static_cast<uint64_t>(rows), ld));
  if (batch == 1) return;
  auto set = [&](cublasLtMatrixLayoutAttribute_t attribute, const auto& value) {
    GW_CUBLAS_CHECK(cublasLtMatrixLayoutSetAttribute(layout.get(), attribute, &value, sizeof value));
  };
  set(CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, static_cast<int32_t>(batch));
  set(CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, stride);
}

// The descriptors and the algorithm of a kind of product. cuBLASLt is column-major: D = op(A) op(B) [+ bias].
//
// A row-major matrix is the column-major matrix of its transpose, in the same memory. C^T = op(B)^T op(A)^T,
// so the operands are swapped, and each keeps its flag: the memory of B, read as column-major, is B^T, which
// is op(B)^T unless transpose_b is set. The bias runs along a row of C, so along a column of C^T, as the bias
// epilogue adds it (one element per row of D, the same for all columns). The auxiliary matrix of GELU's
// epilogues has the layout of D.
class Plan {
 public:
  // Selects an algorithm, cuBLASLt's first choice without a tuning file; usable() is false if there is none.
  Plan(const LtContext& context, const Gemm& g) {
    describe(g);
    const Preference preference = preference_for(g, context.workspace_bytes);
    TuningFile* const file = TuningFile::shared();
    std::array<cublasLtMatmulHeuristicResult_t, kMaxFound> found = {};
    int count = 0;
    const cublasStatus_t status = cublasLtMatmulAlgoGetHeuristic(
        context.lt, operation_.get(), a_.get(), b_.get(), d_.get(), d_.get(), preference.get(),
        file != nullptr ? kMaxFound : 1, found.data(), &count);
    if (status == CUBLAS_STATUS_NOT_SUPPORTED || (status == CUBLAS_STATUS_SUCCESS && count == 0)) return;
    check_cublas(status, "cublasLtMatmulAlgoGetHeuristic");
    if (found[0].state == CUBLAS_STATUS_SUCCESS) algorithm_ = found[0].algo;
    if (file != nullptr) choose(context, g, *file, {found.data(), static_cast<size_t>(count)});
  }

  bool usable() const { return algorithm_.has_value(); }
  void run(const LtContext& context, const Gemm& g) {
    if (g.bias.data != nullptr) set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, g.bias.data);
    if (g.aux.data != nullptr) set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, g.aux.data);
    GW_CUBLAS_CHECK(cublasLtMatmul(context.lt, operation_.get(), &g.alpha, g.b.data, a_.get(), g.a.data,
                                   b_.get(), &g.beta, g.c.data, d_.get(), g.c.data, d_.get(), &*algorithm_,
                                   context.workspace, context.workspace_bytes, context.stream));
  }

 private:
  void describe(const Gemm& g) {
    GW_CUBLAS_CHECK(cublasLtMatmulDescCreate(operation_.out(), compute_type(g.precision), CUDA_R_32F));
    const cublasOperation_t op_a = g.transpose_b ? CUBLAS_OP_T : CUBLAS_OP_N;
    const cublasOperation_t op_b = g.transpose_a ? CUBLAS_OP_T : CUBLAS_OP_N;
    set(CUBLASLT_MATMUL_DESC_TRANSA, op_a);
    set(CUBLASLT_MATMUL_DESC_TRANSB, op_b);
    if (const cublasLtEpilogue_t epilogue = epilogue_of(g); epilogue != CUBLASLT_EPILOGUE_DEFAULT)
      set(CUBLASLT_MATMUL_DESC_EPILOGUE, epilogue);
    if (g.aux.data != nullptr) {  // D's type is the default
      set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, g.aux.data);
      set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, g.ldc);
    }
    if (g.bias.data != nullptr) {
      set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, g.bias.data);
      set(CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, static_cast<int32_t>(cuda_type(g.c.type)));
    }
    const auto [rows_b, columns_b] = g.transpose_b ? std::pair(g.n, g.k) : std::pair(g.k, g.n);
    const auto [rows_a, columns_a] = g.transpose_a ? std::pair(g.k, g.m) : std::pair(g.m, g.k);
    lay_out(a_, g.b.type, rows_b, columns_b, g.ldb, g.stride_b, g.batch);
    lay_out(b_, g.a.type, rows_a, columns_a, g.lda, g.stride_a, g.batch);
    lay_out(d_, g.c.type, g.m, g.n, g.ldc, g.stride_c, g.batch);
  }

  Preference preference_for(const Gemm& g, size_t workspace_bytes) const {
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
    const auto aligned = alignments_of(g);
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, aligned[1]);
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, aligned[0]);
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, aligned[2]);
    // The pointers above determine the alignment of the bias and the pre-activations.
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, aligned[2]);
    return preference;
  }

  // Returns false if the file has no algorithm for the product, or if this library rejects the saved
  // algorithm.
  bool take_saved(const LtContext& context, const TuningFile& file, const TuningFile::Key& key) {
    cublasLtMatmulAlgo_t saved = {};
    const auto text = file.find(key);
    if (!text || !from_hex_bytes(*text, &saved, sizeof saved)) return false;
    cublasLtMatmulHeuristicResult_t checked = {};
    if (cublasLtMatmulAlgoCheck(context.lt, operation_.get(), a_.get(), b_.get(), d_.get(), d_.get(), &saved,
                                &checked) != CUBLAS_STATUS_SUCCESS ||
        checked.workspaceSize > context.workspace_bytes)
      return false;
    algorithm_ = saved;
    return true;
  }

  // Uses the algorithm in the file, or times the algorithms that cuBLASLt found and saves the fastest.
  void choose(const LtContext& context, const Gemm& g, TuningFile& file,
              std::span<const cublasLtMatmulHeuristicResult_t> found) {
    const TuningFile::Key key{context.device_name, fmt::format("cublasLt {}", cublasLtGetVersion()),
                              kind_of(g)};
    if (take_saved(context, file, key)) return;
    cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
    GW_CUDA_CHECK(cudaStreamIsCapturing(context.stream, &capture));
    if (capture != cudaStreamCaptureStatusNone) return;  // timing is not possible during a capture
    Gemm trial = g;                                      // the product may add to the caller's C
    trial.alpha = 1.0f, trial.beta = 0.0f;
    const int64_t elements = (g.batch - 1) * g.stride_c + g.ldc * g.m;
    const auto bytes = static_cast<size_t>(elements * element_bytes(g.c.type));
    const size_t flushed = 2 * context.cache_bytes;
    CudaMemory scratch;
    const cudaError_t status = cudaMalloc(scratch.out(), bytes + flushed);
    if (status == cudaErrorMemoryAllocation) {
      cudaGetLastError();  // clears the sticky error
      return;              // use cuBLASLt's first choice
    }
    check(status, "cudaMalloc");
    trial.c.data = scratch.get();
    const auto product = [&] { run(context, trial); };
    std::vector<std::pair<float, cublasLtMatmulAlgo_t>> timed;
    for (const auto& candidate : found) {
      if (candidate.state != CUBLAS_STATUS_SUCCESS) continue;
      algorithm_ = candidate.algo;
      timed.emplace_back(time_ms(product, context.stream), candidate.algo);
    }
    const auto ms = &std::pair<float, cublasLtMatmulAlgo_t>::first;
    std::ranges::stable_sort(timed, {}, ms);
    if (timed.size() > kFinalists) timed.resize(kFinalists);
    for (auto& [time, algorithm] : timed) {
      algorithm_ = algorithm;
      time = time_in_graph_ms(product, static_cast<char*>(scratch.get()) + bytes, flushed, context.stream);
    }
    if (timed.empty()) return;
    algorithm_ = std::ranges::min_element(timed, {}, ms)->second;
    file.add(key, hex_bytes(&*algorithm_, sizeof *algorithm_));
  }

  template <typename T>
  void set(cublasLtMatmulDescAttributes_t attribute, const T& value) {
    GW_CUBLAS_CHECK(cublasLtMatmulDescSetAttribute(operation_.get(), attribute, &value, sizeof value));
  }

  Operation operation_;
  Layout a_, b_, d_;
  std::optional<cublasLtMatmulAlgo_t> algorithm_;
};

// The properties that determine a plan.
using PlanKey = std::tuple<bool, bool, Element, Element, Precision, bool, Epilogue, std::array<uint32_t, 5>,
                           std::array<int64_t, 10>>;
PlanKey key_of(const Gemm& g) {
  const bool one = g.batch == 1;  // its distances do not matter
  return {g.transpose_a,
          g.transpose_b,
          g.a.type,
          g.c.type,
          g.precision,
          g.bias.data != nullptr,
          g.epilogue,
          alignments_of(g),
          {g.m, g.n, g.k, g.lda, g.ldb, g.ldc, g.batch, one ? 0 : g.stride_a, one ? 0 : g.stride_b,
           one ? 0 : g.stride_c}};
}

// One thread's products on one stream, with the handle, the workspace and the plans.
class Context {
 public:
  Context(int device, CudaStream stream) {
    GW_CUBLAS_CHECK(cublasCreate(handle_.out()));
    GW_CUBLAS_CHECK(cublasSetStream(handle_.get(), stream));
    int major = 0;
    GW_CUDA_CHECK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
    cudaDeviceProp properties = {};
    GW_CUDA_CHECK(cudaGetDeviceProperties(&properties, device));
    const size_t workspace_bytes = size_t{major >= 9 ? 32u : 4u}
                                   << 20;  // the size that NVIDIA's documentation recommends
    const Ones ones;
    GW_CUDA_CHECK(cudaMalloc(workspace_.out(), workspace_bytes + sizeof ones));
    ones_ = reinterpret_cast<const Ones*>(static_cast<const char*>(workspace_.get()) + workspace_bytes);
    GW_CUDA_CHECK(
        cudaMemcpyAsync(const_cast<Ones*>(ones_), &ones, sizeof ones, cudaMemcpyHostToDevice, stream));
    GW_CUBLAS_CHECK(cublasSetWorkspace(handle_.get(), workspace_.get(), workspace_bytes));
    // A cuBLAS handle contains a cuBLASLt handle and may be used as one.
    lt_ = {
        reinterpret_cast<cublasLtHandle_t>(handle_.get()), stream,         workspace_.get(), workspace_bytes,
        static_cast<size_t>(properties.l2CacheSize),       properties.name};
    GW_CUBLAS_CHECK(cublasSetMathMode(
        handle_.get(),
        static_cast<cublasMath_t>(CUBLAS_DEFAULT_MATH | CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION)));
  }

  // Runs the product by a plan. Returns false when cuBLASLt has no algorithm for the product.
  bool planned(const Gemm& g) {
    auto at = plans_.find(key_of(g));
    if (at == plans_.end()) at = plans_.emplace(key_of(g), std::make_unique<Plan>(lt_, g)).first;
    if (!at->second->usable()) return false;
    at->second->run(lt_, g);
    return true;
  }

  // Runs a batch on cuBLAS, which is also column-major: see Plan.
  void batch(const Gemm& g) {
    auto distance = [](int64_t ld) { return static_cast<int>(std::max<int64_t>(1, ld)); };
    GW_CUBLAS_CHECK(cublasGemmStridedBatchedEx(
        handle_.get(), g.transpose_b ? CUBLAS_OP_T : CUBLAS_OP_N, g.transpose_a ? CUBLAS_OP_T : CUBLAS_OP_N,
        static_cast<int>(g.n), static_cast<int>(g.m), static_cast<int>(g.k), &g.alpha, g.b.data,
        cuda_type(g.b.type), distance(g.ldb), g.stride_b, g.a.data, cuda_type(g.a.type), distance(g.lda),
        g.stride_a, &g.beta, g.c.data, cuda_type(g.c.type), distance(g.ldc), g.stride_c,
        static_cast<int>(g.batch), compute_type(g.precision), CUBLAS_GEMM_DEFAULT));
  }

  // Sets C = beta C + bias in each row: a product of 1 and the bias per row.
  void spread_bias(const Gemm& g) {
    Gemm row{.m = 1, .n = g.n, .k = 1};
    const bool rounded = g.c.type == Element::bf16;
    row.a = rounded ? MatrixPointer<const void>(&ones_->bf16) : MatrixPointer<const void>(&ones_->fp32);
    row.b = g.bias;
    row.lda = 1, row.ldb = g.n, row.ldc = g.ldc;
    row.stride_c = g.ldc;
    row.beta = g.beta;
    constexpr int64_t kMaxRows = 65535;  // limit of a grid's z, in case the library uses it for batches
    for (int64_t first = 0; first < g.m; first += kMaxRows) {
      row.batch = std::min(kMaxRows, g.m - first);
      if (rounded)
        row.c = g.c.at<Bf16>(first * g.ldc);
      else
        row.c = g.c.at<float>(first * g.ldc);
      OpCount::launch("gemm");
      batch(row);
    }
  }

 private:
  struct Ones {
    float fp32 = 1.0f;
    Bf16 bf16 = narrow<Bf16>(1.0f);
  };

  CudaMemory workspace_;  // destroyed after the handle
  Owned<cublasHandle_t, cublasDestroy> handle_;
  LtContext lt_;
  const Ones* ones_ = nullptr;  // ones in device memory, after the workspace
  std::map<PlanKey, std::unique_ptr<Plan>> plans_;
};

// Returns the thread's context for the stream. Keeps only the most recently used contexts: each has a
// workspace of up to 32 MiB, and streams are short-lived.
Context& context_for(CudaStream stream) {
  constexpr size_t kMax = 8;
  using Key = std::pair<int, CudaStream>;
  using Entry = std::pair<Key, std::unique_ptr<Context>>;
  static PerThread<std::list<Entry>> all;
  auto& contexts = all.get();
  int device = 0;
  GW_CUDA_CHECK(cudaGetDevice(&device));
  const Key key{device, stream};
  const auto at = std::ranges::find(contexts, key, &Entry::first);
  if (at != contexts.end()) {
    contexts.splice(contexts.begin(), contexts, at);
  } else {
    contexts.emplace_front(key, std::make_unique<Context>(device, stream));
    if (contexts.size() > kMax) contexts.pop_back();  // waits for the GPU
  }
  return *contexts.front().second;
}

}  // namespace

void gemm(CudaStream stream, const Gemm& g) {
  detail::check(g);
  if (g.m == 0 || g.n == 0 || g.batch == 0) return;
  Context& context = context_for(stream);
  // cuBLASLt's epilogues require that the leading dimension of the pre-activations is a multiple of 8.
  const bool fits = g.epilogue == Epilogue::none || g.aux.data == nullptr || g.ldc % 8 == 0;
  const bool planned = g.k > 0 && fits && context.planned(g);
  if (!planned && g.epilogue != Epilogue::none) {
    gemm(stream, without_epilogue(g));
    return apply_epilogue(
        g, [=](const auto& a) { bias_gelu(stream, a); },
        [=](const auto& a) { bias_gelu_backward(stream, a); });
  }
  Gemm product = g;
  if (!planned && g.bias.data != nullptr) {
    context.spread_bias(g);
    if (g.k == 0) return;
    product.beta = 1.0f;
  }
  OpCount::launch("gemm");
  if (!planned) context.batch(product);
}

}  // namespace gradwire::cuda
