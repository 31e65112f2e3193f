#include "trainer/measure/nvml.h"

#include <dlfcn.h>

#include <algorithm>
#include <cctype>

namespace gradwire {
namespace {

// The part of NVML's ABI that is used here (the driver's nvml.h; versioned names keep it stable).
struct PciInfo {  // nvmlPciInfo_t
  char legacy_address[16];
  unsigned domain, bus, device, device_id, subsystem_id;
  char address[32];
};
using Handle = void*;
constexpr int kSuccess = 0, kMostLinks = 36;
constexpr int kTypeSwitch = 2;  // nvmlIntNvLinkDeviceType_t

template <typename Function>
Function* find(void* library, const char* name) {
  return reinterpret_cast<Function*>(dlsym(library, name));
}

std::string lower(std::string text) {
  std::transform(text.begin(), text.end(), text.begin(),
                 [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  return text;
}

// "00000000:3B:00.0" and "0000:3b:00.0" are the same device.
bool same_address(const std::string& a, const std::string& b) {
  const size_t n = std::min(a.size(), b.size());
  return n >= 12 && lower(a.substr(a.size() - 12)) == lower(b.substr(b.size() - 12));
}

}  // namespace

NvLinks::NvLinks(const std::vector<std::string>& addresses) {
  for (const std::string& address : addresses) gpus_.push_back({address, {}, 0});
  void* library = dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    source_ = "NVLinks unknown: NVML (libnvidia-ml.so.1) cannot be opened";
    return;
  }
  auto* init = find<int()>(library, "nvmlInit_v2");
  auto* shutdown = find<int()>(library, "nvmlShutdown");
  auto* by_address = find<int(const char*, Handle*)>(library, "nvmlDeviceGetHandleByPciBusId_v2");
  auto* link_state = find<int(Handle, unsigned, unsigned*)>(library, "nvmlDeviceGetNvLinkState");
  auto* remote = find<int(Handle, unsigned, PciInfo*)>(library, "nvmlDeviceGetNvLinkRemotePciInfo_v2");
  auto* remote_type = find<int(Handle, unsigned, int*)>(library, "nvmlDeviceGetNvLinkRemoteDeviceType");
  if (!init || !shutdown || !by_address || !link_state || !remote || init() != kSuccess) {
    source_ = "NVLinks unknown: NVML cannot be initialized";
    dlclose(library);
    return;
  }
  for (Gpu& gpu : gpus_) {
    Handle handle = nullptr;
    if (by_address(gpu.address.c_str(), &handle) != kSuccess) continue;
    for (unsigned link = 0; link < kMostLinks; ++link) {
      unsigned active = 0;
      PciInfo there{};
      if (link_state(handle, link, &active) != kSuccess || active == 0) continue;
      int type = -1;
      if (remote_type != nullptr && remote_type(handle, link, &type) == kSuccess && type == kTypeSwitch) {
        ++gpu.to_switches;
      } else if (remote(handle, link, &there) == kSuccess) {
        there.address[sizeof there.address - 1] = '\0';
        gpu.peers.push_back(there.address);
      }
    }
  }
  shutdown();
  dlclose(library);
  source_ = "NVML";
}

int NvLinks::between(int a, int b) const {
  const Gpu &from = gpus_[static_cast<size_t>(a)], &to = gpus_[static_cast<size_t>(b)];
  const auto direct = std::count_if(from.peers.begin(), from.peers.end(),
                                    [&](const std::string& peer) { return same_address(peer, to.address); });
  return static_cast<int>(direct) + std::min(from.to_switches, to.to_switches);
}

}  // namespace gradwire
