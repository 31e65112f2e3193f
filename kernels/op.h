// Dispatch of an op from its public name to the device of its stream.
//
// Each op has one argument struct and up to four functions of the same name:
//   gradwire::op(stream, args)        public: enqueues on the stream, host or CUDA
//   gradwire::host::op(args)          the host's fast path; runs on the stream's thread
//   gradwire::cuda::op(stream, args)  in a .cu; enqueues, never synchronizes
//   gradwire::reference::op(args)     scalar and simple, in double where it helps; tests compare with it
// The family's header declares the sides; its public function passes the arguments to one of them. Argument
// structs hold raw device pointers and are copied; the memory must outlive the stream's work. Counts of 0 are
// legal everywhere and do nothing.
#pragma once

#include <string>
#include <type_traits>

#include "kernels/math/bf16.h"
#include "runtime/device/device.h"
#include "runtime/device/op_count.h"
#include "runtime/util/error.h"

// Declares an op's three sides.
#define GW_SIDES(op, Args)                      \
  namespace reference {                         \
  void op(const Args& args);                    \
  }                                             \
  namespace host {                              \
  void op(const Args& args);                    \
  }                                             \
  namespace cuda {                              \
  void op(CudaStream stream, const Args& args); \
  }

// As GW_SIDES, for an op over the storage type S of the operands of matrix products: float (also when the
// arguments are a braced list) or Bf16. Args is a template.
#define GW_TYPED_SIDES(op, Args)                                                                         \
  namespace reference {                                                                                  \
  template <typename S = float>                                                                          \
  void op(const Args<S>& args);                                                                          \
  }                                                                                                      \
  namespace host {                                                                                       \
  template <typename S = float>                                                                          \
  void op(const Args<S>& args);                                                                          \
  }                                                                                                      \
  namespace cuda { /* no default: nvcc repeats it after a kernel launched in a lambda, and refuses it */ \
  template <typename S>                                                                                  \
  void op(CudaStream stream, const Args<S>& args);                                                       \
  }

// Follow the definitions of a typed op: of its reference or host side, and of its CUDA side.
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

namespace gradwire::detail {

template <typename Args>
void dispatch(const Stream& stream, const Args& args, void (*host_op)(const Args&),
              std::type_identity_t<void (*)(CudaStream, const Args&)> cuda_op, const char* name) {
  OpCount::op(name);
  if (stream.device().is_host()) {
    stream.submit([args, host_op] { host_op(args); });
  } else if (cuda_op != nullptr) {
    make_current(stream.device());
    cuda_op(stream.native(), args);
  } else {
    throw DeviceError(std::string(name) + ": this build has no CUDA side");
  }
}

// As dispatch(), for an op that also takes a `form`, such as a wire format's options.
template <typename Form, typename Args>
void dispatch_with(const Stream& stream, const Form& form, const Args& args,
                   void (*host_op)(const Form&, const Args&),
                   std::type_identity_t<void (*)(CudaStream, const Form&, const Args&)> cuda_op,
                   const char* name) {
  OpCount::op(name);
  if (stream.device().is_host()) {
    stream.submit([form, args, host_op] { host_op(form, args); });
  } else if (cuda_op != nullptr) {
    make_current(stream.device());
    cuda_op(stream.native(), form, args);
  } else {
    throw DeviceError(std::string(name) + ": this build has no CUDA side");
  }
}

}  // namespace gradwire::detail
