// libgradwire_nccl.so: when preloaded into a program that uses NCCL, compresses large float32 calls of
// ncclAllReduce. See docs/extending.md.
//
// Defines ncclAllReduce, the group calls (only to track their depth), and the calls that end a communicator
// (to drop the communicator's state). Each function calls NCCL's function of the same name.
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <fmt/format.h>
#include <nccl.h>

#include <map>
#include <memory>
#include <mutex>

#include "integrations/nccl/compressed.h"
#include "integrations/nccl/decide.h"
#include "runtime/util/environment.h"
#include "runtime/util/error.h"
#include "runtime/util/file.h"

namespace gradwire::interposer {
namespace {

// Returns NCCL's function of this name. RTLD_NEXT does not find an NCCL that the program loaded outside the
// global scope; a lookup by the library's name does.
template <typename Function>
Function next(const char* symbol) {
  void* found = dlsym(RTLD_NEXT, symbol);
  if (found == nullptr) {
    if (void* library = dlopen("libnccl.so.2", RTLD_NOW | RTLD_NOLOAD)) found = dlsym(library, symbol);
  }
  return reinterpret_cast<Function>(found);
}

// The interposer's state for one communicator.
struct CommunicatorState {
  std::mutex mutex;
  bool tried = false;
  std::unique_ptr<CompressedAllReduce> compressed;
};

struct Interposer {
  const Settings settings = Settings::read(environment);
  std::mutex mutex;
  std::map<ncclComm_t, std::shared_ptr<CommunicatorState>> states;
  std::once_flag no_gpu_logged, group_logged, capture_logged;

  std::shared_ptr<CommunicatorState> state_of(ncclComm_t comm) {
    std::lock_guard lock(mutex);
    std::shared_ptr<CommunicatorState>& state = states[comm];
    if (!state) state = std::make_shared<CommunicatorState>();
    return state;
  }
  void drop(ncclComm_t comm) {
    const detail::CallersDevice callers_device;
    std::shared_ptr<CommunicatorState> gone;
    std::lock_guard lock(mutex);
    if (auto at = states.find(comm); at != states.end()) {
      gone = std::move(at->second);
      states.erase(at);
    }
  }
  void log_once(std::once_flag& flag, const std::string& text) {
    std::call_once(flag, [&] { print_error_line(text); });
  }
};

// Returns the process's interposer. Never destroyed, because some programs use NCCL during static
// destruction.
Interposer& interposer() {
  static auto* one = new Interposer;
  return *one;
}

thread_local int group_depth = 0;

bool is_capturing(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  if (cudaStreamIsCapturing(stream, &status) != cudaSuccess) {
    cudaGetLastError();
    return false;
  }
  return status != cudaStreamCaptureStatusNone;
}

// Returns whether the interposer has handled the call; if so, `result` is the call's result.
bool compress(const void* send, void* receive, const Request& request, ncclComm_t comm, cudaStream_t stream,
              ncclResult_t& result) {
  Interposer& all = interposer();
  const Decision decision = decide(all.settings, request);
  if (decision == Decision::untouched_group) {
    all.log_once(all.group_logged,
                 "large calls of ncclAllReduce inside ncclGroupStart/End stay uncompressed");
  } else if (decision == Decision::untouched_capture) {
    all.log_once(all.capture_logged,
                 "large calls of ncclAllReduce captured in a CUDA graph stay uncompressed");
  }
  if (all.settings.dry_run && decision == Decision::compressed) {
    print_error_line(
        fmt::format("dry run: would send {} bytes as {}", 4 * request.count, all.settings.spec.to_string()));
  }
  if (!may_compare(request)) return false;
  if (cuda_device_count() == 0) {
    all.log_once(all.no_gpu_logged, fmt::format("off, calls are unchanged: {}", cuda_unavailable_reason()));
    return false;
  }
  const std::shared_ptr<CommunicatorState> state = all.state_of(comm);
  std::lock_guard lock(state->mutex);
  const detail::CallersDevice callers_device;
  try {
    if (!state->tried) {
      state->tried = true;
      auto device_of = next<decltype(&ncclCommCuDevice)>("ncclCommCuDevice");
      int device = 0;
      if (device_of == nullptr || device_of(comm, &device) != ncclSuccess) return false;
      auto made = std::make_unique<CompressedAllReduce>(comm, device, all.settings);
      if (made->rank() == 0 && !made->description().empty()) print_error_line(made->description());
      if (made->usable()) state->compressed = std::move(made);
    }
    if (!state->compressed || decision != Decision::compressed || all.settings.dry_run) return false;
    state->compressed->run(static_cast<const float*>(send), static_cast<float*>(receive), request.count,
                           request.op, stream);
    result = ncclSuccess;
  } catch (const CommError& error) {
    print_error_line(error.what());
    result = ncclSystemError;
  } catch (const DeviceError& error) {
    print_error_line(error.what());
    result = ncclUnhandledCudaError;
  } catch (const std::exception& error) {
    print_error_line(error.what());
    result = ncclInternalError;
  }
  return true;
}

}  // namespace
}  // namespace gradwire::interposer

#define GRADWIRE_FORWARD(function, ...)                                                \
  static const auto real = gradwire::interposer::next<decltype(&function)>(#function); \
  if (real == nullptr) return ncclSystemError;                                         \
  return real(__VA_ARGS__)

#define GRADWIRE_EXPORT extern "C" __attribute__((visibility("default")))

GRADWIRE_EXPORT ncclResult_t ncclAllReduce(const void* send, void* receive, size_t count, ncclDataType_t type,
                                           ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream) {
  using namespace gradwire::interposer;
  // Cheap checks first, because most calls are not compressed.
  if (type == ncclFloat32 && (op == ncclSum || op == ncclAvg) && comm != nullptr) {
    const Request request{static_cast<int64_t>(count), type, op, group_depth, is_capturing(stream)};
    ncclResult_t result = ncclSuccess;
    if (compress(send, receive, request, comm, stream, result)) return result;
  }
  GRADWIRE_FORWARD(ncclAllReduce, send, receive, count, type, op, comm, stream);
}

GRADWIRE_EXPORT ncclResult_t ncclGroupStart() {
  ++gradwire::interposer::group_depth;
  GRADWIRE_FORWARD(ncclGroupStart);
}

GRADWIRE_EXPORT ncclResult_t ncclGroupEnd() {
  if (gradwire::interposer::group_depth > 0) --gradwire::interposer::group_depth;
  GRADWIRE_FORWARD(ncclGroupEnd);
}

GRADWIRE_EXPORT ncclResult_t ncclCommDestroy(ncclComm_t comm) {
  gradwire::interposer::interposer().drop(comm);
  GRADWIRE_FORWARD(ncclCommDestroy, comm);
}

// Frees memory after the abort: until then, kernels that use the memory may be waiting for a peer.
GRADWIRE_EXPORT ncclResult_t ncclCommAbort(ncclComm_t comm) {
  static const auto real = gradwire::interposer::next<decltype(&ncclCommAbort)>("ncclCommAbort");
  if (real == nullptr) return ncclSystemError;
  const ncclResult_t result = real(comm);
  gradwire::interposer::interposer().drop(comm);
  return result;
}
