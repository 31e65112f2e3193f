// CUDA functions that the NCCL transport needs besides NCCL. Tests supply other functions.
#pragma once

#include <nccl.h>

#include <memory>

#include "collectives/transport/exchange_watch.h"
#include "runtime/device/device.h"

namespace gradwire {

class GpuCalls {
 public:
  virtual ~GpuCalls() = default;
  virtual bool capturing(const Stream& stream) = 0;
  virtual cudaStream_t native(const Stream& stream) = 0;
  // For an exchange that runs once, and for a captured one.
  virtual std::unique_ptr<ExchangeMark> make_mark() = 0;
  virtual std::unique_ptr<ExchangeMark> make_captured_mark(const Stream& stream) = 0;
  // Must be called first in a thread that polls marks or calls NCCL, so that it does not disturb captures
  // elsewhere.
  virtual void enter_thread() {}
};

}  // namespace gradwire
