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
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>

#include "kernels/gemm/column_major_gemm.h"
#include "kernels/gemm/cublaslt_plan.h"
#include "kernels/gemm/epilogue.h"
#include "kernels/gemm/gemm.h"
#include "kernels/gemm/tuning.h"
#include "runtime/device/cuda_check.h"
#include "runtime/threads/thread.h"

namespace gradwire::cuda {
namespace {

// Returns whether cuBLASLt can apply the epilogue. cuBLASLt requires that the leading dimension of the
// pre-activations is a multiple of 8.
bool fits_epilogue(const Gemm& g) {
  return g.epilogue == Epilogue::none || g.aux.data == nullptr || g.ldc % 8 == 0;
}

// The properties that determine a plan.
using PlanKey = std::tuple<bool, bool, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, Element, Element,
                           Precision, bool, Epilogue, std::array<uint32_t, 5>, std::array<int64_t, 4>>;
// Returns the alignments of a, b, c, the bias and aux; 0: no aux.
std::array<uint32_t, 5> alignments_of(const Gemm& g) {
  return {alignment_of(g.a.data, g.stride_a, g.a.type, g.batch),
          alignment_of(g.b.data, g.stride_b, g.b.type, g.batch),
          alignment_of(g.c.data, g.stride_c, g.c.type, g.batch), alignment_of(g.bias.data),
          g.aux.data == nullptr ? 0 : alignment_of(g.aux.data)};
}
// Returns the number of products and their distances; a batch of one has distances of 0.
std::array<int64_t, 4> batch_of(const Gemm& g) {
  if (g.batch == 1) return {1, 0, 0, 0};
  return {g.batch, g.stride_a, g.stride_b, g.stride_c};
}
PlanKey key_of(const Gemm& g) {
  return {g.transpose_a, g.transpose_b,
          g.m,           g.n,
          g.k,           g.lda,
          g.ldb,         g.ldc,
          g.a.type,      g.c.type,
          g.precision,   g.bias.data != nullptr,
          g.epilogue,    alignments_of(g),
          batch_of(g)};
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

// One thread's products on one stream, with the handle, the workspace and the plans.
class Context {
 public:
  // Creates the handles. Delegates, so that a failure halfway runs the destructor.
  Context(int device, CudaStream stream) : Context() {
    GW_CUBLAS_CHECK(cublasCreate(&handle_));
    GW_CUBLAS_CHECK(cublasSetStream(handle_, stream));
    int major = 0;
    GW_CUDA_CHECK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
    cudaDeviceProp properties = {};
    GW_CUDA_CHECK(cudaGetDeviceProperties(&properties, device));
    device_name_ = properties.name;
    const size_t workspace_bytes = size_t{major >= 9 ? 32u : 4u}
                                   << 20;  // the size that NVIDIA's documentation recommends
    const Ones ones;
    GW_CUDA_CHECK(cudaMalloc(&workspace_, workspace_bytes + sizeof ones));
    ones_ = reinterpret_cast<const Ones*>(static_cast<const char*>(workspace_) + workspace_bytes);
    GW_CUDA_CHECK(
        cudaMemcpyAsync(const_cast<Ones*>(ones_), &ones, sizeof ones, cudaMemcpyHostToDevice, stream));
    GW_CUBLAS_CHECK(cublasSetWorkspace(handle_, workspace_, workspace_bytes));
    // A cuBLAS handle contains a cuBLASLt handle and may be used as one.
    lt_ = {reinterpret_cast<cublasLtHandle_t>(handle_), stream, workspace_, workspace_bytes};
    GW_CUBLAS_CHECK(cublasSetMathMode(
        handle_,
        static_cast<cublasMath_t>(CUBLAS_DEFAULT_MATH | CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION)));
  }
  ~Context() {
    // The destructor runs at thread exit, possibly after the driver has shut down, so a failure cannot be
    // handled.
    plans_.clear();
    cublasDestroy(handle_);
    ignore(cudaFree(workspace_));
  }
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;

  // Runs the product by a plan. Returns false when cuBLASLt has no algorithm for the product.
  bool planned(const Gemm& g) {
    const ColumnMajorGemm call = column_major(g);
    auto at = plans_.find(key_of(g));
    if (at == plans_.end()) {
      const std::optional<Tuning> tuning = tuning_of(g);
      auto plan = std::make_unique<Plan>(lt_, call, g.precision, tuning ? &*tuning : nullptr);
      at = plans_.emplace(key_of(g), std::move(plan)).first;
    }
    if (!at->second->usable()) return false;
    at->second->run(lt_, call, g.alpha, g.beta);
    return true;
  }

  // Runs a batch on cuBLAS, which is also column-major: kernels/gemm/column_major_gemm.h.
  void batch(const Gemm& g) {
    auto distance = [](int64_t ld) { return static_cast<int>(std::max<int64_t>(1, ld)); };
    GW_CUBLAS_CHECK(cublasGemmStridedBatchedEx(
        handle_, g.transpose_b ? CUBLAS_OP_T : CUBLAS_OP_N, g.transpose_a ? CUBLAS_OP_T : CUBLAS_OP_N,
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
    constexpr int64_t kMostRows = 65535;  // limit of a grid's z, in case the library uses it for batches
    for (int64_t first = 0; first < g.m; first += kMostRows) {
      row.batch = std::min(kMostRows, g.m - first);
      if (rounded)
        row.c = g.c.at<Bf16>(first * g.ldc);
      else
        row.c = g.c.at<float>(first * g.ldc);
      OpCount::launch("gemm");
      batch(row);
    }
  }

 private:
  Context() = default;

  struct Ones {
    float fp32 = 1.0f;
    Bf16 bf16 = narrow<Bf16>(1.0f);
  };

  std::optional<Tuning> tuning_of(const Gemm& g) const {
    TuningFile* const file = TuningFile::shared();
    if (file == nullptr) return std::nullopt;
    return Tuning{file, {device_name_, fmt::format("cublasLt {}", cublasLtGetVersion()), kind_of(g)}};
  }

  std::string device_name_;
  cublasHandle_t handle_ = nullptr;
  void* workspace_ = nullptr;
  LtContext lt_;
  const Ones* ones_ = nullptr;  // ones in device memory, after the workspace
  std::map<PlanKey, std::unique_ptr<Plan>> plans_;
};

// Returns the thread's context for the stream. Keeps only the most recently used contexts: each has a
// workspace of up to 32 MiB, and streams are short-lived.
Context& context_for(CudaStream stream) {
  constexpr size_t kMost = 8;
  using Key = std::pair<int, CudaStream>;
  static PerThread<std::list<std::pair<Key, std::unique_ptr<Context>>>> all;
  auto& contexts = all.get();
  int device = 0;
  GW_CUDA_CHECK(cudaGetDevice(&device));
  const Key key{device, stream};
  const auto at = std::ranges::find(contexts, key, [](const auto& entry) { return entry.first; });
  if (at != contexts.end()) {
    contexts.splice(contexts.begin(), contexts, at);
  } else {
    contexts.emplace_front(key, std::make_unique<Context>(device, stream));
    if (contexts.size() > kMost) contexts.pop_back();  // waits for the GPU
  }
  return *contexts.front().second;
}

template <typename S>
void apply_epilogue(CudaStream stream, const Gemm& g) {
  g.epilogue == Epilogue::gelu_tanh ? bias_gelu(stream, gelu_after<S>(g))
                                    : bias_gelu_backward(stream, d_gelu_after<S>(g));
}

}  // namespace

void gemm(CudaStream stream, const Gemm& g) {
  detail::check(g);
  if (g.m == 0 || g.n == 0 || g.batch == 0) return;
  Context& context = context_for(stream);
  const bool planned = g.k > 0 && fits_epilogue(g) && context.planned(g);
  if (!planned && g.epilogue != Epilogue::none) {
    gemm(stream, without_epilogue(g));
    return g.c.type == Element::bf16 ? apply_epilogue<Bf16>(stream, g) : apply_epilogue<float>(stream, g);
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
