#include "trainer/cli/session.h"

#include <unistd.h>
#include <zlib.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <vector>

#ifdef GRADWIRE_HAS_CUDA
#include <cublas_v2.h>
#include <cuda_runtime_api.h>
#endif

#include "collectives/communicator/communicator.h"
#include "collectives/transport/nccl/nccl.h"
#include "collectives/transport/tcp/tcp.h"
#include "kernels/simd/vector.h"
#include "runtime/device/device.h"
#include "runtime/threads/thread.h"
#include "runtime/threads/thread_pool.h"
#include "runtime/util/environment.h"
#include "runtime/util/error.h"
#include "runtime/util/file.h"
#include "runtime/util/parse.h"
#include "trainer/cli/launcher.h"
#include "trainer/data/dataset.h"
#include "trainer/log/console.h"
#include "trainer/log/summary.h"
#include "trainer/measure/peaks.h"
#include "trainer/measure/ranks.h"

namespace gradwire {
namespace {

class Report {
 public:
  void title(const std::string& text) { text_ += fmt::format("{}{}\n", text_.empty() ? "" : "\n", text); }
  void row(const std::string& name, const std::string& value) { text_ += row_text(name, value); }
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
  const auto limit = static_cast<double>(memory_by_limit());
  if (limit == 0 || limit >= bytes) return human_bytes(bytes);
  return fmt::format("{} allowed by the control group, of {}", human_bytes(limit), human_bytes(bytes));
}

#if defined(__clang__)
constexpr const char* kCompiler = "clang " __clang_version__;
#else
constexpr const char* kCompiler = "g++ " __VERSION__;
#endif

void add_cuda(Report& report) {
  report.title("CUDA");
#ifdef GRADWIRE_HAS_CUDA
  auto version = [](int v) { return fmt::format("{}.{}", v / 1000, v % 1000 / 10); };
  int driver = 0, runtime = 0;
  cudaRuntimeGetVersion(&runtime);
  report.row("runtime", version(runtime) + " (linked statically)");
  bool has_driver = cudaDriverGetVersion(&driver) == cudaSuccess && driver > 0;
  report.row("driver", has_driver ? fmt::format("supports CUDA {}", version(driver)) : "none");
  int major = 0, minor = 0, patch = 0;
  if (cublasGetProperty(MAJOR_VERSION, &major) == CUBLAS_STATUS_SUCCESS &&
      cublasGetProperty(MINOR_VERSION, &minor) == CUBLAS_STATUS_SUCCESS &&
      cublasGetProperty(PATCH_LEVEL, &patch) == CUBLAS_STATUS_SUCCESS) {
    report.row("cuBLAS", fmt::format("{}.{}.{}", major, minor, patch));
  }
  report.row("architectures", GRADWIRE_CUDA_ARCHITECTURES);
  for (int i = 0; i < cuda_device_count(); ++i) {
    cudaDeviceProp properties{};
    if (cudaGetDeviceProperties(&properties, i) != cudaSuccess) continue;
    report.row(
        Device::cuda(i).name(),
        fmt::format("{}, sm_{}{}, {}, {} multiprocessors", std::string(properties.name), properties.major,
                    properties.minor, human_bytes(static_cast<double>(properties.totalGlobalMem)),
                    properties.multiProcessorCount));
  }
  if (cuda_device_count() == 0) report.row("devices", fmt::format("none: {}", cuda_unavailable_reason()));
#else
  report.row("off", cuda_unavailable_reason());
#endif
}

std::string machine_text(const std::string& launcher) {
  Report report;
  report.title("Gradwire " GRADWIRE_VERSION);
  report.row("compiler", kCompiler);
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
  report.row("threads", fmt::format("{} compute threads, shared by the ranks of a process{}", host_threads(),
                                    environment("GRADWIRE_THREADS") != nullptr ? " (GRADWIRE_THREADS)" : ""));
  report.row("SIMD", simd_level());
  report.row("memory", memory());
  report.row("BLAS", host_products_text());
  report.row("zlib", zlibVersion());
  add_cuda(report);
  report.title("Ranks");
  report.row("one process", "on: --ranks N, a thread each (local transport)");
  report.row("processes, TCP", "torchrun, srun or mpirun, or RANK and WORLD_SIZE by hand");
  const std::string no_nccl = nccl_unavailable_reason();
  report.row("processes, GPUs", !no_nccl.empty() ? fmt::format("off: {}", no_nccl)
                                : cuda_device_count() > 0
                                    ? fmt::format("on: as above, one GPU each (NCCL {})", nccl_version())
                                    : fmt::format("off: no GPU (NCCL {} is installed)", nccl_version()));
  report.row("launcher", launcher);
  report.title("Data");
  try {
    const std::string directory = default_fashion_mnist_directory();
    std::error_code ignored;
    const bool there = std::filesystem::exists(directory, ignored);
    report.row("fashion-mnist",
               there ? directory : fmt::format("no folder {}; make setup installs it", directory));
  } catch (const BadInput& error) {
    report.row("fashion-mnist", error.what());
  }
  return report.text_;
}

struct Machine {
  std::vector<std::string> gpus;           // PCI addresses
  std::vector<std::pair<int, int>> apart;  // GPUs of which the first cannot access the second's memory
  Network network = find_network();
};

Machine look_around() {
  Machine machine;
#ifdef GRADWIRE_HAS_CUDA
  for (int a = 0; a < cuda_device_count(); ++a) {
    char address[32] = "";
    if (cudaDeviceGetPCIBusId(address, sizeof address, a) != cudaSuccess) cudaGetLastError();
    machine.gpus.emplace_back(address);
    for (int b = 0; b < cuda_device_count(); ++b) {
      int reachable = 0;
      if (a == b || (cudaDeviceCanAccessPeer(&reachable, a, b) == cudaSuccess && reachable == 1)) continue;
      machine.apart.emplace_back(a, b);
    }
  }
#endif
  return machine;
}

std::string connections_text(const Machine& machine) {
  Report report;
  if (machine.gpus.size() > 1) {
    report.title("Between GPUs");
    for (const auto& [a, b] : machine.apart) report.row(fmt::format("{} - {}", a, b), "no peer access");
    if (machine.apart.empty()) report.row("peer access", "on");
  }
  report.title("Network");
  for (const NetInterface& i : machine.network.interfaces) {
    const std::string speed =
        i.megabits > 0 ? fmt::format(", {} Mb/s", human_count(static_cast<double>(i.megabits))) : "";
    report.row(i.name, (i.up ? "up" : "not up") + speed);
  }
  for (const InfinibandPort& p : machine.network.ports) {
    report.row(fmt::format("{}:{}", p.device, p.port),
               fmt::format("{}, {}", p.link, p.active ? p.rate : "not active"));
  }
  if (machine.network.interfaces.empty() && machine.network.ports.empty())
    report.row("", "no interface except loopback");
  return "\n" + report.text_;
}

std::string peaks_text(Device device, const std::string& precision, const Peaks& peaks) {
  Report report;
  report.title("Peaks (measured)");
  report.row(device.name(), fmt::format("{:.3g} TFLOP/s {} product, {:.3g} GB/s copied (read and written)",
                                        peaks.tflops, precision, peaks.copy_gb_per_s));
  if (std::isfinite(peaks.fma_share)) {
    report.row("",
               fmt::format("an fp32 product reaches {:.0f} % of a core's FMA peak", 100 * peaks.fma_share));
  }
  const std::string slow = slow_products_warning(peaks.fma_share);
  if (!slow.empty()) report.row("warning", slow);
  return "\n" + report.text_;
}

Json machine_json(const Machine& machine) {
  Json json{{"version", GRADWIRE_VERSION}, {"processor", cpu_name()}, {"threads", host_threads()}};
  json["products"] = host_products_text();
  json["gpus"] = machine.gpus;
  json["no_peer_access"] = machine.apart;
  json["network"] = Json::array();
  for (const NetInterface& i : machine.network.interfaces) {
    json["network"].push_back(
        {{"name", i.name}, {"up", i.up}, {"megabits", i.megabits > 0 ? Json(i.megabits) : Json(nullptr)}});
  }
  json["infiniband"] = Json::array();
  for (const InfinibandPort& p : machine.network.ports) {
    json["infiniband"].push_back(
        {{"device", p.device}, {"port", p.port}, {"link", p.link}, {"rate", p.rate}, {"active", p.active}});
  }
  return json;
}

}  // namespace

RunOptions doctor_defaults() {
  RunOptions options;
  options.model.name = "vit_b_32";
  options.batch_size = 32;
  options.timeout_s = 10;
  return options;
}

void doctor(RunOptions options) {
  if (options.environment) {
    std::fputs(environment_text().c_str(), stdout);
    return;
  }
  std::string launcher = "none", refused;
  try {
    options.launch = detect_launcher();
    if (options.launch) {
      launcher = fmt::format("{} ({})", options.launch->launcher, options.launch->variables);
      share_cores(*options.launch);
    }
  } catch (const BadInput& error) {
    launcher = refused = error.what();
  }
  const bool leads = !options.launch || options.launch->rank == 0;
  OutputFile file = leads ? OutputFile(options.json) : OutputFile();
  if (options.rank_count == 0 && !options.launch && options.device != DeviceChoice::host &&
      cuda_device_count() > 1) {
    options.rank_count = cuda_device_count();
  }
  const Resolved resolved = resolve_machine(options);
  const TrainConfig& config = resolved.config;
  auto say = [&](const std::string& text) {
    if (!leads) return;
    std::fputs(text.c_str(), stdout);
    std::fflush(stdout);
  };
  Json json;
  if (leads) {
    say(machine_text(launcher));
    const Machine machine = look_around();
    say(connections_text(machine));
    if (!refused.empty()) throw BadInput(refused);
    for (const std::string& note : resolved.notes) say("\n" + note + "\n");
    json = machine_json(machine);
  }
  const Device device = config.devices.front();
  const auto show = [&](const Peaks& peaks) {
    say(peaks_text(device, name(config.precision), peaks));
    json["peaks"] = {
        {"tflops", peaks.tflops}, {"copy_gb_per_s", peaks.copy_gb_per_s}, {"fma_share", peaks.fma_share}};
  };
  if (config.ranks() == 1) {
    show(measure_peaks(device, config.precision));
    say("\nLinks: one rank has none. With --ranks N, or under torchrun, srun or mpirun, doctor measures\n"
        "the links between ranks and says which compression pays for --model and --batch-size\n");
  } else {
    const std::unique_ptr<Communicator> comm = join(options, config);
    const RanksReport report =
        examine_group(config, comm.get(), [&](Communicator& mine) { return examine_ranks(mine, config); });
    show(report.peaks);
    say(links_text(report));
    say(recommendation_text(report, config.model));
    json["ranks"] = ranks_json(report);
    json["prediction"] = prediction_json(report, config.model);
    if (comm) comm->barrier();  // keeps a rank from exiting while others communicate
  }
  file.write(json_text(json, 2) + "\n");
}

}  // namespace gradwire
