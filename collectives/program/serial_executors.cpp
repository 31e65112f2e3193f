// Executors whose operations do not overlap, and the choice of an executor.
#include "collectives/program/compiler.h"
#include "collectives/program/executor.h"
#include "runtime/util/error.h"

namespace gradwire {
namespace {

// Returns the bytes of this rank's window that other ranks read.
int64_t bytes_read(const FusedAllreduce& call, Wire wire) {
  const int world = call.peers.world, rank = call.peers.rank;
  int64_t others = 0;  // bytes of other ranks' chunks
  for (int c = 0; c < world; ++c) {
    if (c != rank) others += wire->bytes(call.begin[c + 1] - call.begin[c]);
  }
  const int64_t own = call.begin[rank + 1] - call.begin[rank];
  if (!call.one_shot) return others + (world - 1) * wire->bytes(own);
  return (world - 1) * (others + 4 * own);
}

// Carries out the whole program as one kernel over peer windows.
class KernelExecutor final : public SerialExecutor {
 public:
  KernelExecutor(const ProgramPlan& plan, const ProgramMemory& memory) : SerialExecutor(plan) {
    bind(memory);
    info_.schedule += " in one kernel";
    info_.bytes_sent = bytes_read(call_, plan.options.wire);
  }

  void bind(const ProgramMemory& memory) override {
    call_ = fused_call(plan_.transport, plan_.schedule, plan_.count, plan_.shards, plan_.options);
    call_.peers = plan_.windows->memory;
    call_.in = memory.in;
    call_.out = memory.out;
    call_.residual = plan_.options.wire->exact ? nullptr : memory.residual;
    lay_out(call_, plan_.options.wire);
  }

 private:
  void enqueue_on(const Stream& stream) override {
    plan_.transport.peer_access()->run_kernel(
        stream, *plan_.windows, static_cast<uint64_t>(info_.bytes_sent), plan_.call.what,
        [wire = plan_.options.wire, call = call_](const Stream& on) { wire->fused_allreduce(on, call); });
  }

  FusedAllreduce call_;
};

// Uses peer windows inside nodes, and messages between nodes.
class NodeExecutor final : public SerialExecutor {
 public:
  NodeExecutor(const ProgramPlan& plan, const ProgramMemory& memory) : SerialExecutor(plan) {
    bind(memory);
    info_.schedule += " over windows inside nodes";
    for (const Operation& operation : program_.operations) {
      const auto* exchange = std::get_if<Exchange>(&operation);
      if (exchange == nullptr) continue;
      ++info_.exchanges;
      info_.bytes_sent += exchange->bytes_sent();
    }
  }

  void bind(const ProgramMemory& memory) override {
    program_ = compile(plan_, memory);
    workspace_bytes_ = program_.workspace_bytes;
  }

 private:
  void enqueue_on(const Stream& stream) override {
    for (const Operation& operation : program_.operations) {
      if (const auto* kernel = std::get_if<Kernel>(&operation)) {
        kernel->launch(stream, plan_.options.wire);
        continue;
      }
      const auto& exchange = std::get<Exchange>(operation);
      exchange.in_windows ? synchronize_node(stream, exchange)
                          : plan_.transport.exchange(stream, exchange.transfers, exchange.label);
    }
  }

  void synchronize_node(const Stream& stream, const Exchange& exchange) {
    plan_.transport.peer_access()->run_kernel(
        stream, *plan_.windows, static_cast<uint64_t>(exchange.bytes_sent()), exchange.label.what,
        [barrier = stream_barrier(plan_.windows->memory)](const Stream& on) {
          kFp32->fused_allreduce(on, barrier);
        });
  }

  CompiledProgram program_;
};

// Calls the transport's own allreduce.
class LibraryExecutor final : public SerialExecutor {
 public:
  LibraryExecutor(const ProgramPlan& plan, const ProgramMemory& memory) : SerialExecutor(plan) {
    bind(memory);
    info_.bytes_sent = 4 * elements_sent(plan.schedule, plan.rank(), plan.count);
  }

  void bind(const ProgramMemory& memory) override { memory_ = memory; }

 private:
  void enqueue_on(const Stream& stream) override {
    if (plan_.count == 0) return;
    const float scale = plan_.options.scale;
    const bool mean = scale == 1.0f / static_cast<float>(plan_.schedule.world);
    plan_.transport.native_allreduce()->allreduce(stream, memory_.in, memory_.out, plan_.count, mean,
                                                  static_cast<uint64_t>(info_.bytes_sent), plan_.call.what);
    if (mean || scale == 1.0f) return;
    fp32_reduce(stream, {.own = memory_.out, .out = memory_.out, .scale = scale, .count = plan_.count});
  }

  ProgramMemory memory_;
};

}  // namespace

std::unique_ptr<ProgramExecutor> make_executor(const ProgramPlan& plan, const ProgramMemory& memory) {
  switch (plan.execution) {
    case Execution::messages:
      return make_message_executor(plan, memory);
    case Execution::two_shot_kernel:
    case Execution::one_shot_kernel:
      return std::make_unique<KernelExecutor>(plan, memory);
    case Execution::node_peer_access:
      return std::make_unique<NodeExecutor>(plan, memory);
    case Execution::library:
      return std::make_unique<LibraryExecutor>(plan, memory);
  }
  throw Error("make_executor: unknown execution");
}

}  // namespace gradwire
