// How an op gets from its public name to the device of its stream.
//
// Each op has one argument struct and up to four functions of the same name:
//   gradwire::op(stream, args)      public: enqueues on the stream, host or CUDA
//   gradwire::host::op(args)        the host's fast path; runs on the stream's thread
//   gradwire::cuda::op(stream, args)  the family's .cu; enqueues, never synchronizes
//   gradwire::reference::op(args)   scalar and obvious, in double where it helps; tests hold the other two to
//   it
// Argument structs hold raw device pointers and are copied; the memory must outlive the stream's work.
// Counts of 0 are legal everywhere and do nothing.
#pragma once

#include "kernels/math/bf16.h"
#include "runtime/device.h"
#include "runtime/error.h"

#define GW_DECLARE_OP(op, Args)                    \
  void op(const Stream& stream, const Args& args); \
  namespace reference {                            \
  void op(const Args& args);                       \
  }                                                \
  namespace host {                                 \
  void op(const Args& args);                       \
  }                                                \
  namespace cuda {                                 \
  void op(CudaStream stream, const Args& args);    \
  }

// The same for an op over the storage type T of the operands that matrix products read and write: float (what
// an argument list in braces means, too) or Bf16. Args is a template.
#define GW_DECLARE_TYPED_OP(op, Args)                                                                     \
  template <typename T = float>                                                                           \
  void op(const Stream& stream, const Args<T>& args);                                                     \
  namespace reference {                                                                                   \
  template <typename T = float>                                                                           \
  void op(const Args<T>& args);                                                                           \
  }                                                                                                       \
  namespace host {                                                                                        \
  template <typename T = float>                                                                           \
  void op(const Args<T>& args);                                                                           \
  }                                                                                                       \
  namespace cuda { /* no default: nvcc repeats it behind a kernel launched in a lambda, and refuses it */ \
  template <typename T>                                                                                   \
  void op(CudaStream stream, const Args<T>& args);                                                        \
  }

// Behind the definitions of a typed op's reference or host side, and of its CUDA side.
#define GW_INSTANTIATE_OP(op, Args)       \
  template void op(const Args<float>& a); \
  template void op(const Args<Bf16>& a);
#define GW_INSTANTIATE_CUDA_OP(op, Args)                \
  template void op(CudaStream s, const Args<float>& a); \
  template void op(CudaStream s, const Args<Bf16>& a);

#ifdef GRADWIRE_HAS_CUDA
#define GW_CUDA_SIDE(op) cuda::op
#else
#define GW_CUDA_SIDE(op) nullptr
#endif

// Defines the public function. Goes into the op family's .cpp beside its header, inside namespace gradwire.
#define GW_DEFINE_OP(op, Args)                                             \
  void op(const Stream& stream, const Args& args) {                        \
    detail::dispatch<Args>(stream, args, host::op, GW_CUDA_SIDE(op), #op); \
  }

#define GW_DEFINE_TYPED_OP(op, Args)                                                \
  template <typename T>                                                             \
  void op(const Stream& stream, const Args<T>& args) {                              \
    detail::dispatch<Args<T>>(stream, args, host::op<T>, GW_CUDA_SIDE(op<T>), #op); \
  }                                                                                 \
  template void op(const Stream& stream, const Args<float>& args);                  \
  template void op(const Stream& stream, const Args<Bf16>& args);

namespace gradwire::detail {

template <typename Args>
void dispatch(const Stream& stream, const Args& args, void (*host_op)(const Args&),
              void (*cuda_op)(CudaStream, const Args&), const char* name) {
  if (stream.device().is_host()) {
    stream.submit([args, host_op] { host_op(args); });
  } else if (cuda_op != nullptr) {
    make_current(stream.device());
    cuda_op(stream.native(), args);
  } else {
    throw DeviceError(std::string(name) + ": this build has no CUDA side");
  }
}

}  // namespace gradwire::detail
