#ifdef GRADWIRE_HAS_NCCL

#include "collectives/transport/nccl/nccl_api.h"

#include <dlfcn.h>

#include "runtime/util/environment.h"
#include "runtime/util/error.h"

namespace gradwire {
namespace {

constexpr int kOldest = 21800;  // NCCL 2.18: has communicator configuration and its defaults

template <typename Function>
void find(void* library, Function& function, const char* symbol, bool required = true) {
  function = reinterpret_cast<Function>(dlsym(library, symbol));
  if (function == nullptr && required) {
    throw BadInput("NCCL lacks {}; install version 2.18 or newer", symbol);
  }
}

NcclApi load() {
  const char* named = path_in_environment("GRADWIRE_NCCL_LIBRARY");
  const std::string library = named != nullptr ? named : "libnccl.so.2";
  void* handle = dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) {
    const char* why = dlerror();
    throw BadInput(
        "NCCL cannot be loaded: {}; install it, add its folder to LD_LIBRARY_PATH, or name it in "
        "GRADWIRE_NCCL_LIBRARY",
        why != nullptr ? why : library.c_str());
  }
  NcclApi api;
  find(handle, api.get_version, "ncclGetVersion");
  find(handle, api.error_string, "ncclGetErrorString");
  int version = 0;
  api.get_version(&version);
  if (version < kOldest) {
    throw BadInput("NCCL {} is too old; install version 2.18 or newer", api.version());
  }
  find(handle, api.get_unique_id, "ncclGetUniqueId");
  find(handle, api.init_rank, "ncclCommInitRankConfig");
  find(handle, api.finalize, "ncclCommFinalize");
  find(handle, api.destroy, "ncclCommDestroy");
  find(handle, api.abort, "ncclCommAbort");
  find(handle, api.async_error, "ncclCommGetAsyncError");
  find(handle, api.count, "ncclCommCount");
  find(handle, api.user_rank, "ncclCommUserRank");
  find(handle, api.device, "ncclCommCuDevice");
  find(handle, api.group_start, "ncclGroupStart");
  find(handle, api.group_end, "ncclGroupEnd");
  find(handle, api.send, "ncclSend");
  find(handle, api.receive, "ncclRecv");
  find(handle, api.split, "ncclCommSplit");
  find(handle, api.all_reduce, "ncclAllReduce");
  find(handle, api.last_error, "ncclGetLastError", false);
  find(handle, api.shrink, "ncclCommShrink", false);
  find(handle, api.revoke, "ncclCommRevoke", false);
  return api;
}

}  // namespace

std::string NcclApi::text(ncclResult_t result, ncclComm_t comm) const {
  std::string text = error_string(result);
  const char* more = last_error != nullptr ? last_error(comm) : nullptr;
  if (more != nullptr && *more != '\0') text += fmt::format(" ({})", more);
  return text;
}

std::string NcclApi::version() const {
  int v = 0;
  get_version(&v);
  return fmt::format("{}.{}.{}", v / 10000, v / 100 % 100, v % 100);
}

const NcclApi& NcclApi::loaded() {
  static const NcclApi api = load();  // if load() throws, the next call retries
  return api;
}

}  // namespace gradwire

#endif  // GRADWIRE_HAS_NCCL
