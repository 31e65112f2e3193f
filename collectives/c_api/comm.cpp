#include "collectives/c_api/comm.h"

#include <fmt/format.h>
#include <unistd.h>

#include <tuple>

#include "collectives/c_api/errors.h"
#include "collectives/c_api/handles.h"
#include "collectives/plan/planner.h"
#include "kernels/wire/registered.h"

namespace gradwire::c_api {
namespace {

constexpr size_t kProgramsKept = 64;
constexpr size_t kCallerStreamsKept = 64;

}  // namespace

Handles<ApiComm>& comms() {
  static auto* handles = new Handles<ApiComm>(1, "communicator");
  return *handles;
}

ApiComm::ApiComm(std::unique_ptr<Communicator> c)
    : communicator(std::move(c)),
      process_(getpid()),
      programs_(communicator->device(), kProgramsKept),
      step_(make_buffer<uint64_t>(communicator->device(), 1)),
      start_(Event::create(communicator->device())),
      done_(Event::create(communicator->device())),
      stream(Stream::create(communicator->device(), "communicate")) {
  fill_zero(stream, step_.data(), step_.bytes());
  stream.synchronize();
}

ApiComm::~ApiComm() {
  for (const Stream& busy : {stream, communicator->transfers()}) {
    try {
      busy.synchronize();
    } catch (...) {  // reported to whoever waited for the failed operation
    }
  }
}

void ApiComm::check_process() const {
  if (getpid() != process_) {
    throw BadHandle(fmt::format(
        "the handle belongs to process {}, and this is a fork of it; create communicators after forking",
        process_));
  }
}

void ApiComm::check_caller() const {
  check_process();
  require(!in_format_callback(),
          "called by a wire format's encode or decode, which this call would wait for");
}

void ApiComm::wait_and_tell(const std::function<void()>& wait) {
  try {
    wait();
  } catch (const CommError& error) {
    bool they_know = false;
    try {
      communicator->check();
    } catch (const CommError&) {
      they_know = true;
    }
    if (!they_know) communicator->abort(error.what());
    throw;
  }
}

Stream ApiComm::caller_stream(void* native) {
  const Device device = communicator->device();
  if (device.is_host()) {
    require(native == nullptr, "stream is not null, but the communicator is on the host, where calls block");
    return Stream::immediate_host();
  }
  if (callers_.size() > kCallerStreamsKept) callers_.clear();  // of a caller that makes a stream per step
  auto [at, fresh] = callers_.try_emplace(native);
  if (fresh) at->second = Stream::adopt_cuda(device.index, static_cast<CudaStream>(native));
  return at->second;
}

Program& ApiComm::program_for(const Key& key) {
  if (auto* entry = programs_.find(key)) return *entry->program;
  const auto& [buf, count, dtype, op, text, tag] = key;
  const CompressionSpec spec = CompressionSpec::parse(text);
  if (spec.method != CompressionSpec::Method::wire) {
    throw BadInput(fmt::format(
        "spec '{}' keeps state between steps and gw_allreduce cannot; use a reducer, or fp32, bf16 or fp8",
        text));
  }
  const int world = communicator->world();
  const SchedulePlanner plan({.kind = spec.schedule, .fp32_intra_node = spec.fp32_intra_node}, world,
                             communicator->ranks_per_node(),
                             world > 1 ? communicator->link_costs(stream) : LinkCosts{}, kAutomaticSlices);
  const SchedulePlanner::Choice choice = plan.choose(count, spec.wire);
  auto program = std::make_unique<Program>(
      communicator->transport(), choice.schedule,
      ProgramBuffers{
          .in = buf, .out = buf, .count = count, .dtype = dtype == GW_BFLOAT16 ? DType::bf16 : DType::f32},
      Program::Options{
          .what = fmt::format("gw_allreduce{}, {} of {}", quoted(tag), op == GW_AVG ? "mean" : "sum",
                              dtype == GW_BFLOAT16 ? "bfloat16" : "float32"),
          .wire = spec.wire,
          .fp32_intra_node = spec.fp32_intra_node,
          .scale = op == GW_AVG ? 1.0f / static_cast<float>(world) : 1.0f,
          .rounding = {spec.rounding, static_cast<uint64_t>(communicator->rank()) + 1,
                       step_.as<const uint64_t>(), 0},
          .spec = spec.to_string(),
          .transfers = communicator->transfers(),
          .slice_bytes = choice.slice_bytes});
  stream.synchronize();  // add() may free or rebind memory that is in use
  return *programs_.add({.key = key, .residual = {}, .program = std::move(program)}).program;
}

void ApiComm::allreduce(void* buf, int64_t count, gw_dtype dtype, gw_op op, const char* spec,
                        void* native_stream, const std::string& tag) {
  require(count >= 0, "count is {}, must not be negative", count);
  require(dtype == GW_FLOAT32 || dtype == GW_BFLOAT16, "dtype {} is neither GW_FLOAT32 nor GW_BFLOAT16",
          dtype);
  require(op == GW_SUM || op == GW_AVG, "op {} is neither GW_SUM nor GW_AVG", op);
  require(spec != nullptr, "spec is null; pass \"fp32\" for no compression");
  require(buf != nullptr || count == 0, "buf is null");
  const size_t element = dtype == GW_FLOAT32 ? 4 : 2;
  require(reinterpret_cast<uintptr_t>(buf) % element == 0, "buf is not aligned to its elements of {} bytes",
          element);
  const Stream caller = caller_stream(native_stream);
  Program& program = program_for({buf, count, dtype, op, spec, tag});
  if (communicator->world() == 1) return;

  start_.record(caller);
  stream.wait(start_);
  program.run(stream);
  increment(stream, step_.as<uint64_t>());
  done_.record(stream);
  wait_and_tell([&] { caller.wait(done_); });
}

}  // namespace gradwire::c_api
