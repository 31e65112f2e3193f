#include "runtime/device/nvtx.h"

#ifdef GRADWIRE_HAS_CUDA
#include <cuda_runtime_api.h>
#include <nvtx3/nvToolsExt.h>
#include <nvtx3/nvToolsExtCudaRt.h>

#include <array>
#endif

namespace gradwire {

const char* name(Activity activity) {
  static constexpr const char* names[kActivities] = {"batch",       "forward",    "backward", "compress",
                                                     "communicate", "decompress", "optimizer"};
  return names[static_cast<int>(activity)];
}

#ifdef GRADWIRE_HAS_CUDA
namespace {

// The domain and its names are registered once, so that a range costs two calls and no string.
struct Domain {
  Domain() {
    for (int i = 0; i < kActivities; ++i) {
      names[static_cast<size_t>(i)] = nvtxDomainRegisterStringA(handle, name(static_cast<Activity>(i)));
    }
  }
  nvtxDomainHandle_t handle = nvtxDomainCreateA("gradwire");
  std::array<nvtxStringHandle_t, kActivities> names{};
};

const Domain& domain() {
  static const Domain domain;
  return domain;
}

// The colors of the activities, the same as in bench/plots/plot.py.
constexpr uint32_t kColors[kActivities] = {0xffb8bec8, 0xff9db7d5, 0xff4f7cac, 0xff7b5ea7,
                                           0xffd1495b, 0xff3a9d8f, 0xffedae49};

}  // namespace

NvtxRange::NvtxRange(Activity activity, int64_t number) {
  const auto which = static_cast<size_t>(activity);
  nvtxEventAttributes_t attributes{};
  attributes.version = NVTX_VERSION;
  attributes.size = NVTX_EVENT_ATTRIB_STRUCT_SIZE;
  attributes.colorType = NVTX_COLOR_ARGB;
  attributes.color = kColors[which];
  attributes.payloadType = NVTX_PAYLOAD_TYPE_INT64;
  attributes.payload.llValue = number;
  attributes.messageType = NVTX_MESSAGE_TYPE_REGISTERED;
  attributes.message.registered = domain().names[which];
  nvtxDomainRangePushEx(domain().handle, &attributes);
}

NvtxRange::~NvtxRange() {
  nvtxDomainRangePop(domain().handle);
}

void name_stream(CudaStream stream, const std::string& name) {
  nvtxNameCudaStreamA(stream, name.c_str());
}
#else
NvtxRange::NvtxRange(Activity, int64_t) {}
NvtxRange::~NvtxRange() {}
void name_stream(CudaStream, const std::string&) {}
#endif

}  // namespace gradwire
