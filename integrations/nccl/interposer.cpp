// libgradwire_nccl.so: when preloaded into a program that uses NCCL, compresses large float32 calls of
// ncclAllReduce. See docs/extending.md.
//
// Defines ncclAllReduce, the group calls (only to track their depth), and the calls that end a communicator
// (to drop the communicator's state). Each function calls NCCL's function of the same name.
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <nccl.h>

#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <tuple>

#include "collectives/agreement/statements.h"
#include "collectives/codec/codec.h"
#include "collectives/codec/residual.h"
#include "collectives/communicator/communicator.h"
#include "collectives/plan/planner.h"
#include "collectives/program/program.h"
#include "collectives/transport/nccl/nccl.h"
#include "collectives/transport/transport.h"
#include "integrations/nccl/decide.h"
#include "runtime/util/environment.h"
#include "runtime/util/error.h"
#include "runtime/util/file.h"

namespace gradwire::interposer {

// The interposer's compressed allreduce, on the program's NCCL communicator.

// The compressed allreduce of one communicator. Calls must not be concurrent, as NCCL requires.
//
// Error feedback is tied to memory addresses: there is a residual for each (send buffer, receive buffer,
// count, operation), which in training frameworks is a gradient bucket. The cache has the programs and
// residuals of the kMaxPrograms most recent buckets. Residuals do not affect whether a call is compressed, so
// residuals may differ between ranks.
class CompressedAllReduce {
 public:
  // Adopts `comm` and compares settings with the other ranks. Collective; blocks.
  CompressedAllReduce(ncclComm_t comm, int device, const Settings& settings);
  ~CompressedAllReduce();

  // Returns whether all ranks have the same settings, and the settings allow compression.
  bool usable() const { return usable_; }
  // Returns a line for the log that describes the compression of this communicator's calls.
  const std::string& description() const { return description_; }
  int rank() const { return comm_->rank(); }

  void run(const float* send, float* receive, int64_t count, ncclRedOp_t op, cudaStream_t stream);

  static constexpr size_t kMaxPrograms = 256;

 private:
  using Key = std::tuple<const float*, float*, int64_t, ncclRedOp_t>;
  Program& program_for(const Key& key, const Stream& stream);

  const Settings settings_;
  const int device_;
  std::unique_ptr<Communicator> comm_;
  bool usable_ = false;
  std::string description_;
  Stream setup_;
  std::optional<SchedulePlanner> planner_;
  Buffer step_;
  Event last_;   // end of the previous call; all calls share the workspace
  Event ready_;  // recorded once a new program's memory is allocated
  ProgramCache<Key> programs_;
};

}  // namespace gradwire::interposer

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

namespace gradwire::interposer {

CompressedAllReduce::CompressedAllReduce(ncclComm_t comm, int device, const Settings& settings)
    // The transport has no timeout: only the communicator's owner, which has a watchdog, may abort the
    // communicator.
    : settings_(settings),
      device_(device),
      comm_(std::make_unique<Communicator>(
          adopt_nccl_communicator(comm, device, std::chrono::milliseconds(0)))),
      setup_(Stream::create(Device::cuda(device), "set-up")),
      programs_(kMaxPrograms, [this](size_t bytes) { return Buffer::in_order(setup_, bytes); }) {
  const int world = comm_->world();
  if (world == 1) return;
  const double mine = static_cast<double>(settings.fingerprint());
  bool agreed = true;
  for (const auto& theirs : all_gather(comm_->transport(), setup_, {mine}, "settings of the interposer")) {
    agreed = agreed && theirs[0] == mine;
  }
  if (!agreed) {
    description_ = "off: ranks have different GRADWIRE_NCCL_ settings; set the same on all";
    return;
  }
  if (!settings.on) {
    description_ = fmt::format("off: {}", settings.why_off);
    return;
  }
  if (settings.ranks_per_node > 0 && world % settings.ranks_per_node == 0)
    comm_->set_ranks_per_node(settings.ranks_per_node);
  try {
    planner_.emplace(settings.spec, Collective::allreduce, world, comm_->ranks_per_node(),
                     comm_->link_costs(setup_, settings.spec.schedule), kAutomaticSlices);
  } catch (const BadInput& error) {  // every rank gets the same error
    description_ = fmt::format("off on this communicator: {}", error.what());
    return;
  }
  step_ = make_buffer<uint64_t>(comm_->device(), 1);
  fill_zero(setup_, step_.data(), step_.bytes());
  setup_.synchronize();
  last_ = Event::create(comm_->device());
  ready_ = Event::create(comm_->device());
  usable_ = true;
  description_ = fmt::format(
      "ncclAllReduce of at least {} bytes of float32, sum or avg, is sent as {} over {} ranks; other calls "
      "are unchanged",
      settings.min_bytes, settings.spec.to_string(), world);
}

CompressedAllReduce::~CompressedAllReduce() {
  try {
    if (last_) setup_.wait(last_);  // work in flight uses memory that is freed on this stream
  } catch (...) {                   // the GPU has failed; ignore the error
  }
}

// Returns the program for `key`. Does not block: memory is allocated and freed in the order of setup_, which
// waits for the calls that use the memory.
Program& CompressedAllReduce::program_for(const Key& key, const Stream& stream) {
  if (auto* entry = programs_.find(key)) return *entry->program;
  const auto& [send, receive, count, op] = key;
  setup_.wait(last_);  // work in flight may use memory that an evicted entry frees
  int64_t state_bytes = count * static_cast<int64_t>(sizeof(float));
  for (const auto& entry : programs_.entries()) state_bytes += static_cast<int64_t>(entry.residual.bytes());
  Buffer residual;
  if (settings_.spec.policy.keeps_errors() && !settings_.spec.wire->exact &&
      state_bytes <= settings_.max_state_bytes) {
    residual = Buffer::in_order(setup_, static_cast<size_t>(count) * sizeof(float));
    fill_zero(setup_, residual.data(), residual.bytes());
  }
  const SchedulePlanner::Choice choice = planner_->choose(count, settings_.spec.wire);
  auto program = std::make_unique<Program>(
      comm_->transport(), choice.schedule, ProgramBuffers{send, receive, residual.as<float>(), count},
      Program::Options{.what = "ncclAllReduce",
                       .wire = settings_.spec.wire,
                       .fp32_intra_node = settings_.spec.fp32_intra_node,
                       .scale = op == ncclAvg ? 1.0f / static_cast<float>(comm_->world()) : 1.0f,
                       .rounding = {settings_.spec.rounding, static_cast<uint64_t>(comm_->rank()) + 1,
                                    step_.as<const uint64_t>(), 0},
                       .transfers = comm_->transfers(),
                       .slice_bytes = choice.slice_bytes});
  Program& added = *programs_.add({key, std::move(residual), std::move(program)}).program;
  ready_.record(setup_);
  stream.wait(ready_);
  return added;
}

void CompressedAllReduce::run(const float* send, float* receive, int64_t count, ncclRedOp_t op,
                              cudaStream_t native) {
  const Stream stream = Stream::adopt_cuda(device_, native);
  Program& program = program_for({send, receive, count, op}, stream);
  stream.wait(last_);
  if (float* const residual = program.buffers().residual; settings_.spec.policy.decay != 1 && residual) {
    decay_residual(stream, residual, count, static_cast<float>(settings_.spec.policy.decay));
  }
  program.run(stream);
  increment(stream, step_.as<uint64_t>());
  last_.record(stream);
}

}  // namespace gradwire::interposer
