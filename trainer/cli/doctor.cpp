#include "trainer/cli/doctor.h"

#include <unistd.h>
#include <zlib.h>

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <vector>

#ifdef GRADWIRE_HAS_CUDA
#include <cublas_v2.h>
#include <cuda_runtime_api.h>
#endif

#include "collectives/transport/gloo.h"
#include "collectives/transport/nccl.h"
#include "kernels/device.h"
#include "kernels/thread_pool.h"
#include "trainer/cli/launcher.h"
#include "trainer/data/dataset.h"
#include "trainer/log/console.h"

// Present in OpenBLAS only; another BLAS leaves it null.
extern "C" __attribute__((weak)) char* openblas_get_config();

namespace gradwire {
namespace {

class Report {
 public:
  void title(const std::string& text) { text_ += (text_.empty() ? "" : "\n") + text + "\n"; }
  void row(const std::string& name, const std::string& value) {
    text_ += "  " + name + std::string(name.size() < 18 ? 18 - name.size() : 1, ' ') + value + "\n";
  }
  std::string text_;
};

std::string cpu_name() {
  std::ifstream cpuinfo("/proc/cpuinfo");
  for (std::string line; std::getline(cpuinfo, line);) {
    if (line.rfind("model name", 0) == 0) return line.substr(line.find(':') + 2);
  }
  return "unknown";
}

std::string memory() {
  double bytes = static_cast<double>(sysconf(_SC_PHYS_PAGES)) * static_cast<double>(sysconf(_SC_PAGE_SIZE));
  return human_bytes(bytes);
}

// The instruction set the host loops run with; kernels/host/simd.h compiles them for these levels.
std::string simd_level() {
#if defined(GRADWIRE_SANITIZED)
  return "default (sanitized build: no run-time dispatch)";
#elif defined(__x86_64__) && defined(__GNUC__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512cd")) {
    return "x86-64-v4 (AVX-512)";
  }
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2")) {
    return "x86-64-v3 (AVX2, FMA)";
  }
  return "x86-64 (SSE2)";
#else
  return "the compiler's default for this architecture";
#endif
}

std::string compiler() {
#if defined(__clang__)
  return "clang " __clang_version__;
#elif defined(__GNUC__)
  return "g++ " __VERSION__;
#else
  return "unknown";
#endif
}

std::string threads_text() {
  int threads = host_threads();
  return std::to_string(threads) + " compute threads, shared by the ranks of a process" +
         (std::getenv("GRADWIRE_THREADS") != nullptr ? " (GRADWIRE_THREADS)" : "");
}

void add_cuda(Report& report) {
  report.title("CUDA");
#ifdef GRADWIRE_HAS_CUDA
  auto version = [](int v) { return std::to_string(v / 1000) + "." + std::to_string(v % 1000 / 10); };
  int driver = 0, runtime = 0;
  cudaRuntimeGetVersion(&runtime);
  report.row("runtime", version(runtime) + " (linked statically)");
  bool has_driver = cudaDriverGetVersion(&driver) == cudaSuccess && driver > 0;
  report.row("driver", has_driver ? "supports CUDA " + version(driver) : "none");
  int major = 0, minor = 0, patch = 0;
  if (cublasGetProperty(MAJOR_VERSION, &major) == CUBLAS_STATUS_SUCCESS &&
      cublasGetProperty(MINOR_VERSION, &minor) == CUBLAS_STATUS_SUCCESS &&
      cublasGetProperty(PATCH_LEVEL, &patch) == CUBLAS_STATUS_SUCCESS) {
    report.row("cuBLAS", std::to_string(major) + "." + std::to_string(minor) + "." + std::to_string(patch));
  }
  report.row("architectures", GRADWIRE_CUDA_ARCHITECTURES);
  for (int i = 0; i < cuda_device_count(); ++i) {
    cudaDeviceProp properties{};
    if (cudaGetDeviceProperties(&properties, i) != cudaSuccess) continue;
    report.row(Device::cuda(i).name(),
               std::string(properties.name) + ", sm_" + std::to_string(properties.major) +
                   std::to_string(properties.minor) + ", " +
                   human_bytes(static_cast<double>(properties.totalGlobalMem)) + ", " +
                   std::to_string(properties.multiProcessorCount) + " multiprocessors");
  }
  if (cuda_device_count() == 0) report.row("devices", "none: " + cuda_unavailable_reason());
#else
  report.row("off", cuda_unavailable_reason());
#endif
}

void add_data(Report& report) {
  report.title("Data");
  std::string directory = default_fashion_mnist_directory();
  std::error_code ignored;
  bool there = std::filesystem::exists(directory + "/train-images-idx3-ubyte.gz", ignored) ||
               std::filesystem::exists(directory + "/train-images-idx3-ubyte", ignored);
  report.row("fashion-mnist",
             there ? directory : "not found (looked in " + directory + "); make setup installs it");
}

}  // namespace

std::string doctor_report() {
  Report report;
  report.title("Gradwire " GRADWIRE_VERSION);
  report.row("compiler", compiler());
#ifdef NDEBUG
  report.row("build", "optimized");
#else
  report.row("build", "with assertions");
#endif
#ifdef GRADWIRE_SANITIZED
  report.row("sanitizers", "on: slow, for tests only");
#endif
  report.title("Host");
  report.row("processor", cpu_name());
  report.row("threads", threads_text());
  report.row("SIMD", simd_level());
  report.row("memory", memory());
  if (openblas_get_config != nullptr) {
    report.row("BLAS", openblas_get_config());
  } else {
    report.row("BLAS", "not OpenBLAS: results are right, speed is unknown");
  }
  report.row("zlib", zlibVersion());
  add_cuda(report);
  report.title("Ranks");
  report.row("one process", "on: --ranks N, a thread each (local transport)");
  report.row("processes, TCP", built_with_gloo()
                                   ? "on: torchrun, srun or mpirun, or RANK and WORLD_SIZE by hand (Gloo)"
                                   : "off: this build has no Gloo; install libgloo-dev and build again");
  const std::string no_nccl = nccl_unavailable_reason();
  report.row("processes, GPUs", !no_nccl.empty() ? "off: " + no_nccl
                                : cuda_device_count() > 0
                                    ? "on: the same, with a GPU each (NCCL " + nccl_version() + ")"
                                    : "off: NCCL " + nccl_version() + " is here, but no GPU");
  try {
    std::optional<Launch> launch = detect_launcher();
    report.row("launcher", launch ? launch->launcher + " (" + launch->variables + ")" : "none");
  } catch (const std::exception& error) {
    report.row("launcher", error.what());
  }
  add_data(report);
  return report.text_;
}

}  // namespace gradwire
