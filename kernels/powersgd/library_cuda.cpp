// The products of PowerSGD's passes by cuBLAS, in FP32. The library is loaded by name, so that libgradwire.so
// does not need it.
//
// Two threads must not share a handle. Repeatable bits need a stream and a workspace that no other handle
// uses. Each thread therefore keeps one handle per (device, stream), made at its first product on that
// stream. Later products neither allocate nor synchronize, so a CUDA graph can capture them after one plain
// run.
#include <cublas_v2.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <fmt/core.h>

#include <map>
#include <memory>
#include <mutex>
#include <utility>

#include "kernels/powersgd/library.h"
#include "runtime/device/device.h"
#include "runtime/device/device_cuda.h"
#include "runtime/threads/thread.h"

#define GW_TEXT_OF(x) #x
#define GW_TEXT(x) GW_TEXT_OF(x)  // the header may define the function's name as a macro for another name

namespace gradwire::cuda {
namespace {

struct CublasApi {
  decltype(&cublasCreate) create = nullptr;
  decltype(&cublasDestroy) destroy = nullptr;
  decltype(&cublasSetStream) set_stream = nullptr;
  decltype(&cublasSetWorkspace) set_workspace = nullptr;
  decltype(&cublasSetMathMode) set_math_mode = nullptr;
  decltype(&cublasGetProperty) get_property = nullptr;
  decltype(&cublasSgemm) sgemm = nullptr;
  decltype(&cublasGetStatusString) status_string = nullptr;
};

// Loads cuBLAS. Returns null when the library cannot be loaded.
const CublasApi* load() {
  const std::string name = fmt::format("libcublas.so.{}", CUBLAS_VER_MAJOR);
  void* library = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) return nullptr;
  static CublasApi api;
  bool complete = true;
  auto find = [&](auto& function, const char* symbol) {
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(library, symbol));
    complete = complete && function != nullptr;
  };
  find(api.create, GW_TEXT(cublasCreate));
  find(api.destroy, GW_TEXT(cublasDestroy));
  find(api.set_stream, GW_TEXT(cublasSetStream));
  find(api.set_workspace, GW_TEXT(cublasSetWorkspace));
  find(api.set_math_mode, GW_TEXT(cublasSetMathMode));
  find(api.get_property, GW_TEXT(cublasGetProperty));
  find(api.sgemm, GW_TEXT(cublasSgemm));
  find(api.status_string, GW_TEXT(cublasGetStatusString));
  return complete ? &api : nullptr;
}

class CublasProducts final : public ThinProducts {
 public:
  explicit CublasProducts(const CublasApi& api) : api_(api) {}

  std::string name() const override {
    int major = 0, minor = 0, patch = 0;
    for (const auto& [which, value] :
         {std::pair(MAJOR_VERSION, &major), {MINOR_VERSION, &minor}, {PATCH_LEVEL, &patch}})
      check(api_.get_property(which, value), "cublasGetProperty");
    return fmt::format("cuBLAS {}.{}.{}", major, minor, patch);
  }

  void run(const Stream& stream, std::span<const ThinGemm> products) override {
    if (products.empty()) return;
    detail::make_current(stream.device());
    cublasHandle_t handle = handle_for(stream.native());
    const float one = 1.0f, zero = 0.0f;
    for (const ThinGemm& g : products) {
      OpCount::launch("cublasSgemm");
      check(api_.sgemm(handle, CUBLAS_OP_N, g.transpose_b ? CUBLAS_OP_T : CUBLAS_OP_N, g.m, g.n, g.k, &one,
                       g.a, g.lda, g.b, g.ldb, &zero, g.c, g.ldc),
            "cublasSgemm");
    }
  }

 private:
  struct Context {
    const CublasApi* api = nullptr;
    cublasHandle_t handle = nullptr;
    void* workspace = nullptr;
    ~Context() {
      // The destructor runs at thread exit, possibly after the driver has shut down, so a failure cannot be
      // handled.
      if (handle != nullptr) api->destroy(handle);
      ignore(cudaFree(workspace));
    }
  };

  void check(cublasStatus_t status, const char* call) const {
    if (status == CUBLAS_STATUS_SUCCESS) return;
    const std::string text = fmt::format("{}: {}", call, api_.status_string(status));
    if (status == CUBLAS_STATUS_ALLOC_FAILED) throw OutOfResources(text);
    throw DeviceError(text);
  }

  cublasHandle_t handle_for(CudaStream stream) {
    constexpr size_t kWorkspaceBytes = size_t{8} << 20;
    static PerThread<std::map<std::pair<int, CudaStream>, std::unique_ptr<Context>>> contexts;
    int device = 0;
    GW_CUDA_CHECK(cudaGetDevice(&device));
    std::unique_ptr<Context>& context = contexts.get()[{device, stream}];
    if (!context) {
      auto made = std::make_unique<Context>();
      made->api = &api_;
      check(api_.create(&made->handle), "cublasCreate");
      check(api_.set_stream(made->handle, stream), "cublasSetStream");
      GW_CUDA_CHECK(cudaMalloc(&made->workspace, kWorkspaceBytes));
      check(api_.set_workspace(made->handle, made->workspace, kWorkspaceBytes), "cublasSetWorkspace");
      check(api_.set_math_mode(made->handle, CUBLAS_DEFAULT_MATH), "cublasSetMathMode");  // FP32, not TF32
      context = std::move(made);
    }
    return context->handle;
  }

  const CublasApi& api_;
};

}  // namespace

ThinProducts* thin_products() {
  const CublasApi* api = load();
  if (api == nullptr) return nullptr;
  static CublasProducts products(*api);
  return &products;
}

}  // namespace gradwire::cuda
