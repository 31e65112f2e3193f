// Compiles a plan into operations for given addresses. Internal to collectives/program.
//
// The compiler walks one rank's rounds. For each round it emits the kernels that must run before the
// exchange, the exchange, and the kernels that depend on the received data. put_in_order() then defers the
// kernels that can wait.
#pragma once

#include <cstddef>
#include <cstdint>
#include <variant>
#include <vector>

#include "collectives/program/program.h"
#include "collectives/transport/transport.h"
#include "kernels/wire/floats.h"
#include "kernels/wire/format.h"

namespace gradwire {

struct Exchange {
  std::vector<Transfer> transfers;
  ExchangeLabel label;
  bool early = false;  // may start before the previous exchange has finished

  int64_t bytes_sent() const;
  int64_t bytes_received() const;
};

struct Kernel {
  std::variant<ReduceEncode, Decode, Reduce> work;
  int after = -1;       // the exchange that the kernel depends on, counted from 0; -1: none
  bool needed = false;  // the next exchange depends on this kernel and on the earlier ones

  void launch(const Stream& stream, Wire wire) const;
};

using Operation = std::variant<Exchange, Kernel>;

struct CompiledProgram {
  std::vector<Operation> operations;
  size_t workspace_bytes = 0;
};

// Compiles a plan for these addresses. With a workspace at address 0, the result is valid only for the size
// of the workspace, not for its operations.
CompiledProgram compile(const ProgramPlan& plan, const ProgramMemory& memory);

// A kernel as the compiler emits it.
struct EmittedKernel {
  static constexpr int kNoExchange = -1;
  Kernel kernel;
  int before = kNoExchange;  // the exchange that depends on the kernel
  bool feeds_next = false;   // the next kernel depends on this kernel
};

// Returns the operations in an order for streams that execute operations one after another. Kernels that the
// next exchange depends on precede kernels that can wait. A kernel that depends on exchange k follows kernels
// that do not depend on exchange k, so that the kernel runs while exchange k + 1 is in flight. `kernels`:
// each kernel after its dependencies. `exchanges`: one per round.
std::vector<Operation> put_in_order(std::vector<EmittedKernel> kernels, std::vector<Exchange> exchanges);

}  // namespace gradwire
