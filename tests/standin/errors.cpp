// Error names, the last error of each thread, and the API call that fails on purpose:
// GRADWIRE_STANDIN_FAIL=N:error[:sticky].
#include <execinfo.h>
#include <fmt/format.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <string_view>

#include "tests/standin/machine.h"

namespace gradwire::standin {
namespace {

struct Name {
  cudaError_t error;
  const char* name;
  const char* text;
};
#define GW_STANDIN_ERROR(error, text) \
  { error, #error, text }
constexpr Name kNames[] = {
    GW_STANDIN_ERROR(cudaSuccess, "no error"),
    GW_STANDIN_ERROR(cudaErrorInvalidValue, "invalid argument"),
    GW_STANDIN_ERROR(cudaErrorMemoryAllocation, "out of memory"),
    GW_STANDIN_ERROR(cudaErrorInvalidConfiguration, "invalid configuration argument"),
    GW_STANDIN_ERROR(cudaErrorInvalidDevice, "invalid device ordinal"),
    GW_STANDIN_ERROR(cudaErrorNoDevice, "no CUDA-capable device is detected"),
    GW_STANDIN_ERROR(cudaErrorInvalidResourceHandle, "invalid resource handle"),
    GW_STANDIN_ERROR(cudaErrorNotReady, "device not ready"),
    GW_STANDIN_ERROR(cudaErrorIllegalAddress, "an illegal memory access was encountered"),
    GW_STANDIN_ERROR(cudaErrorLaunchFailure, "unspecified launch failure"),
    GW_STANDIN_ERROR(cudaErrorPeerAccessAlreadyEnabled, "peer access is already enabled"),
    GW_STANDIN_ERROR(cudaErrorPeerAccessUnsupported,
                     "peer access is not supported between these two devices"),
    GW_STANDIN_ERROR(cudaErrorNotSupported, "operation not supported"),
    GW_STANDIN_ERROR(cudaErrorIllegalState, "the operation cannot be performed in the present state"),
    GW_STANDIN_ERROR(cudaErrorStreamCaptureUnsupported, "operation not permitted when stream is capturing"),
    GW_STANDIN_ERROR(cudaErrorStreamCaptureInvalidated,
                     "operation failed due to a previous error during capture"),
    GW_STANDIN_ERROR(cudaErrorStreamCaptureMerge,
                     "operation would result in a merge of separate capture sequences"),
    GW_STANDIN_ERROR(cudaErrorStreamCaptureUnmatched, "capture was not ended in the same stream as it began"),
    GW_STANDIN_ERROR(cudaErrorStreamCaptureUnjoined, "capturing stream has unjoined work"),
    GW_STANDIN_ERROR(cudaErrorStreamCaptureIsolation,
                     "dependency created on uncaptured work in another stream"),
    GW_STANDIN_ERROR(cudaErrorStreamCaptureWrongThread,
                     "attempt to terminate a thread-local capture sequence from another thread"),
    GW_STANDIN_ERROR(cudaErrorCapturedEvent,
                     "operation not permitted on an event last recorded in a capturing stream"),
    GW_STANDIN_ERROR(cudaErrorUnknown, "unknown error"),
};
#undef GW_STANDIN_ERROR

const Name* find_name(cudaError_t error) {
  for (const Name& name : kNames) {
    if (name.error == error) return &name;
  }
  return nullptr;
}

extern "C" const char executable_begin[] __asm__("__ehdr_start");

// Holds the planted failure and the number of API calls. At exit, the file GRADWIRE_TEST_LOG gets the number
// of calls, the name of the failed call, and the failed call's stack as executable offsets for addr2line.
struct Plan {
  int64_t number = 0;  // number of the call that fails; 0: no call fails
  cudaError_t error = cudaErrorUnknown;
  bool sticky = false;
  std::atomic<int64_t> calls{0};
  std::string failed;  // name of the call that failed on purpose
  std::string stack;
};

std::string describe_stack() {
  void* frames[24];
  const int count = backtrace(frames, static_cast<int>(std::size(frames)));
  std::string text;
  for (int i = 0; i < count; ++i)
    text += fmt::format(" {:#x}", static_cast<const char*>(frames[i]) - executable_begin);
  return text;
}

[[noreturn]] void reject_plan(const char* text) {
  std::fprintf(
      stderr,
      "standin: GRADWIRE_STANDIN_FAIL='%s' is not N:error[:sticky], such as 12:cudaErrorMemoryAllocation "
      "or 40:cudaErrorIllegalAddress:sticky\n",
      text);
  std::_Exit(2);
}

void read_plan(Plan& plan) {
  const char* const text = std::getenv("GRADWIRE_STANDIN_FAIL");
  if (text == nullptr || *text == '\0') return;
  std::string_view rest = text;
  char* end = nullptr;
  plan.number = std::strtoll(text, &end, 10);
  if (plan.number < 1 || *end != ':') reject_plan(text);
  rest.remove_prefix(static_cast<size_t>(end + 1 - text));
  constexpr std::string_view kSticky = ":sticky";
  if (rest.ends_with(kSticky)) {
    plan.sticky = true;
    rest.remove_suffix(kSticky.size());
  }
  for (const Name& name : kNames) {
    if (rest != name.name || name.error == cudaSuccess) continue;
    plan.error = name.error;
    return;
  }
  reject_plan(text);
}

Plan& plan() {
  static Plan& only = []() -> Plan& {
    static auto* const made = new Plan();
    read_plan(*made);
    if (const char* path = std::getenv("GRADWIRE_TEST_LOG"); path != nullptr && *path != '\0') {
      std::atexit([] {
        std::FILE* const file = std::fopen(std::getenv("GRADWIRE_TEST_LOG"), "w");
        if (file == nullptr) return;
        std::fprintf(file, "calls %lld\nfailed %s\nstack%s\n", static_cast<long long>(made->calls.load()),
                     made->failed.c_str(), made->stack.c_str());
        std::fclose(file);
      });
    }
    return *made;
  }();
  return only;
}

thread_local cudaError_t last_error = cudaSuccess;

}  // namespace

cudaError_t begin_call(const char* name) {
  Plan& planned = plan();
  const int64_t number = ++planned.calls;
  const std::lock_guard lock(machine().mutex);
  const auto device = static_cast<size_t>(current_device());
  if (device >= machine().devices.size()) return cudaErrorNoDevice;
  if (number == planned.number) {
    planned.failed = name;
    planned.stack = describe_stack();
    if (planned.sticky) machine().devices[device].sticky = planned.error;
    return planned.error;
  }
  return machine().devices[device].sticky;
}

cudaError_t failed(cudaError_t status) {
  if (status != cudaSuccess) last_error = status;
  return status;
}

}  // namespace gradwire::standin

using namespace gradwire::standin;

extern "C" {

cudaError_t cudaGetLastError() {
  const cudaError_t error = last_error;
  last_error = cudaSuccess;
  return error;
}
cudaError_t cudaPeekAtLastError() {
  return last_error;
}
const char* cudaGetErrorName(cudaError_t error) {
  const Name* const name = find_name(error);
  return name != nullptr ? name->name : "unrecognized error code";
}
const char* cudaGetErrorString(cudaError_t error) {
  const Name* const name = find_name(error);
  return name != nullptr ? name->text : "unrecognized error code";
}

}  // extern "C"
