// Dispatch of an op from its public name to the device of its stream.
//
// Each op has one argument struct and up to four functions of the same name:
//   gradwire::op(stream, args)        public: enqueues on the stream, host or CUDA
//   gradwire::host::op(args)          the host's fast path; runs on the stream's thread
//   gradwire::cuda::op(stream, args)  in a .cu; enqueues, never synchronizes
//   gradwire::reference::op(args)     scalar and simple, in double where it helps; tests compare with it
// Passes (kernels/passes/passes.h) have no reference: tests state their formulas.
// The family's header has a struct of arguments and GW_OP for each op. Argument structs hold raw device
// pointers and are copied; the memory must outlive the stream's work. Counts of 0 are legal everywhere and do
// nothing.
#pragma once

#include <string>
#include <type_traits>

#include "kernels/math/small_float.h"
#include "runtime/device/device.h"
#include "runtime/util/error.h"

#ifdef GRADWIRE_HAS_CUDA
#define GW_CUDA_SIDE(op) cuda::op
#else
#define GW_CUDA_SIDE(op) nullptr  // never called: there are no CUDA streams
#endif

namespace gradwire::detail {

// Calls one side of an op with `args`: usually one argument struct; some ops also take the options of a wire
// format.
template <typename... Args>
void dispatch(const Stream& stream, const char* name, void (*host_op)(const Args&...),
              std::type_identity_t<void (*)(CudaStream, const Args&...)> cuda_op, const Args&... args) {
  OpCount::op(name);
  if (stream.device().is_host()) {
    stream.submit([host_op, args...] { host_op(args...); });
  } else {
    make_current(stream.device());
    cuda_op(stream.native(), args...);
  }
}

// Returns 1 for the first stage of an op that leaves its sums to combine_sums() (kernels/vit/elementwise.h),
// 2 for an op in one launch on CUDA instead of two, because one block suffices; else 0.
template <typename Args>
int variant_of(const Args& args) {
  if constexpr (requires { args.partial_only; }) return args.partial_only ? 1 : 0;
  if constexpr (requires { args.one_block(); }) return args.one_block() ? 2 : 0;
  return 0;
}

}  // namespace gradwire::detail

namespace gradwire {

// An array of an element-wise op (kernels/passes/passes.h). Elements that the op only writes are 0 before;
// so are those of an optional array that is null.
template <typename T, bool kRead, bool kWritten, bool kOptional = false>
struct ElementArray {
  using Value = std::conditional_t<std::is_same_v<T, Bf16>, float, std::remove_const_t<T>>;
  static constexpr bool kReads = kRead, kWrites = kWritten;
  T* data;
  GW_HD bool present() const { return !kOptional || data != nullptr; }
  GW_HD Value load(int64_t i) const {
    if constexpr (kRead) {
      if (present()) return data[i];
    }
    return {};
  }
  GW_HD void store(int64_t i, Value x) const {
    if constexpr (!kWritten)
      return;
    else if (!present())
      return;
    else if constexpr (std::is_same_v<T, Bf16>)
      data[i] = narrow<Bf16>(x);
    else
      data[i] = x;
  }
};
template <typename T>
GW_HD ElementArray<const T, true, false> reads(const T* data) {
  return {data};
}
template <typename T>
GW_HD ElementArray<T, false, true> writes(T* data) {
  return {data};
}
template <typename T>
GW_HD ElementArray<T, true, true> updates(T* data) {
  return {data};
}
template <typename T>
GW_HD ElementArray<T, false, true, true> writes_if(T* data) {
  return {data};
}
template <typename T>
GW_HD ElementArray<T, true, true, true> updates_if(T* data) {
  return {data};
}

}  // namespace gradwire

// Declares an op's host, CUDA and reference functions, and defines its public function.
#define GW_OP(op, Args)                                                    \
  namespace reference {                                                    \
  void op(const Args& args);                                               \
  }                                                                        \
  namespace host {                                                         \
  void op(const Args& args);                                               \
  }                                                                        \
  namespace cuda {                                                         \
  void op(CudaStream stream, const Args& args);                            \
  }                                                                        \
  inline void op(const Stream& stream, const Args& args) {                 \
    detail::dispatch<Args>(stream, #op, host::op, GW_CUDA_SIDE(op), args); \
  }

// Declares and defines the same as GW_OP for an op over the storage type S of the operands of matrix
// products: float (also when the arguments are a braced list) or Bf16. Args is a template.
#define GW_TYPED_OP(op, Args)                                                                             \
  namespace reference {                                                                                   \
  template <typename S = float>                                                                           \
  void op(const Args<S>& args);                                                                           \
  }                                                                                                       \
  namespace host {                                                                                        \
  template <typename S = float>                                                                           \
  void op(const Args<S>& args);                                                                           \
  }                                                                                                       \
  namespace cuda { /* no default: nvcc repeats it after a kernel launched in a lambda, and rejects it */  \
  template <typename S>                                                                                   \
  void op(CudaStream stream, const Args<S>& args);                                                        \
  }                                                                                                       \
  template <typename S = float>                                                                           \
  void op(const Stream& stream, const Args<S>& args) {                                                    \
    static constexpr const char* kNames[] = {#op, #op ", first stage", #op ", one block"};                \
    detail::dispatch<Args<S>>(stream, kNames[detail::variant_of(args)], host::op<S>, GW_CUDA_SIDE(op<S>), \
                              args);                                                                      \
  }

// Instantiate a typed op after its definitions: its reference or host side, and its CUDA side.
#define GW_INSTANTIATE_OP(op, Args)       \
  template void op(const Args<float>& a); \
  template void op(const Args<Bf16>& a);
#define GW_INSTANTIATE_CUDA_OP(op, Args)                \
  template void op(CudaStream s, const Args<float>& a); \
  template void op(CudaStream s, const Args<Bf16>& a);
