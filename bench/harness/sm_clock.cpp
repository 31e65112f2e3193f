#include "bench/harness/sm_clock.h"

#include <dlfcn.h>
#include <fmt/format.h>

#ifdef GRADWIRE_HAS_CUDA
#include <cuda_runtime_api.h>
#endif

namespace gradwire::bench {

std::string throttle_text(uint64_t reasons) {
  // NVML's bits nvmlClocksEventReason...; 0x1 is an idle GPU.
  constexpr struct {
    uint64_t bit;
    const char* text;
  } kReasons[] = {{0x2, "application clocks"}, {0x4, "power cap"},       {0x8, "hardware slowdown"},
                  {0x10, "sync boost"},        {0x20, "thermal"},        {0x40, "hardware thermal"},
                  {0x80, "power brake"},       {0x100, "display clocks"}};
  std::string text;
  for (const auto& reason : kReasons) {
    if ((reasons & reason.bit) != 0) text += fmt::format("{}{}", text.empty() ? "" : ", ", reason.text);
  }
  return text.empty() ? "none" : text;
}

#ifdef GRADWIRE_HAS_CUDA

// The functions of libnvidia-ml.so.1. Their signatures are stable; 0 is success.
struct SmClock::Nvml {
  void* library = nullptr;
  void* device = nullptr;
  int (*shutdown)() = nullptr;
  int (*clock)(void*, int, unsigned*) = nullptr;
  int (*reasons)(void*, unsigned long long*) = nullptr;

  template <typename Function>
  bool find(Function& function, const char* name) {
    function = reinterpret_cast<Function>(dlsym(library, name));
    return function != nullptr;
  }

  // Returns whether NVML knows the GPU. CUDA and NVML number GPUs differently, so the bus address selects it.
  bool open(int index) {
    library = dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) return false;
    int (*init)() = nullptr;
    int (*by_bus)(const char*, void**) = nullptr;
    char bus[32] = {};
    if (!find(init, "nvmlInit_v2") || !find(by_bus, "nvmlDeviceGetHandleByPciBusId_v2") ||
        !find(clock, "nvmlDeviceGetClockInfo") ||
        !find(reasons, "nvmlDeviceGetCurrentClocksThrottleReasons") || init() != 0) {
      return false;
    }
    find(shutdown, "nvmlShutdown");
    return cudaDeviceGetPCIBusId(bus, sizeof bus, index) == cudaSuccess && by_bus(bus, &device) == 0;
  }
  ~Nvml() {
    if (shutdown != nullptr) shutdown();
    if (library != nullptr) dlclose(library);
  }
};

SmClock::SmClock(Device device) {
  if (!device.is_cuda()) return;
  nvml_ = new Nvml;
  if (nvml_->open(device.index)) return;
  cudaGetLastError();  // clear the sticky error
  delete nvml_;
  nvml_ = nullptr;
}

SmClock::~SmClock() {
  delete nvml_;
}

void SmClock::read() {
  constexpr int kSm = 1;  // NVML_CLOCK_SM
  unsigned mhz = 0;
  unsigned long long reasons = 0;
  if (nvml_->clock(nvml_->device, kSm, &mhz) != 0 || nvml_->reasons(nvml_->device, &reasons) != 0) return;
  sum_mhz_ += mhz;
  reasons_ |= reasons;
  ++readings_;
}

#else

struct SmClock::Nvml {};
SmClock::SmClock(Device) {}
SmClock::~SmClock() = default;
void SmClock::read() {}

#endif

void SmClock::sample() {
  constexpr std::chrono::milliseconds kApart{20};
  if (nvml_ == nullptr) return;
  const auto now = std::chrono::steady_clock::now();
  if (readings_ > 0 && now - last_ < kApart) return;
  last_ = now;
  read();
}

void SmClock::report(Timing& timing) {
  if (readings_ > 0) {
    timing.sm_mhz = sum_mhz_ / readings_;
    timing.throttled = throttle_text(reasons_);
  }
  sum_mhz_ = 0;
  reasons_ = 0;
  readings_ = 0;
}

}  // namespace gradwire::bench
