// The operations of a program, in the order in which they are enqueued. Internal to collectives/program.
#pragma once

#include <cstdint>
#include <variant>
#include <vector>

#include "collectives/transport/transport.h"
#include "kernels/wire/format.h"
#include "kernels/wire/fp32.h"

namespace gradwire {

struct Exchange {
  std::vector<Transfer> transfers;
  ExchangeLabel label;
  // Inside a node: a barrier. The transfers list the bytes that ranks read in each other's windows.
  bool in_windows = false;
  bool early = false;  // may start before the previous exchange has finished

  int64_t bytes_sent() const;
  int64_t bytes_received() const;
};

struct Kernel {
  std::variant<ReduceEncode, Decode, Reduce> work;
  int after = -1;       // the exchange it depends on, counted from 0; -1: none
  bool needed = false;  // the next exchange depends on this kernel and on the earlier ones

  void launch(const Stream& stream, Wire wire) const;
};

using Operation = std::variant<Exchange, Kernel>;

}  // namespace gradwire
