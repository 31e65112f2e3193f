// Replaces cuda_runtime.h when g++ compiles a kernel for the CPU. Provides CUDA's names on top of runtime.h.
//
// Kernels that use a missing name deliberately fail to compile. Missing: inline PTX, textures, clusters, TMA,
// wgmma, dynamic parallelism, cooperative groups, CUB, concurrent streams. `cudaStream_t` arguments are
// ignored, because a launch has ended when it returns. tests/standin compiles kernels with GRADWIRE_STANDIN,
// which enqueues each launch on its stream.
//
// The shim is deliberately stricter than CUDA:
//   - every lane named in the mask of a warp collective must reach the collective, on the same source line;
//     lanes that returned early do not count as arrived;
//   - every thread of the block must reach the same __syncthreads();
//   - 16-byte accesses are checked for alignment, arithmetic for undefined behaviour, memory for bounds;
//   - the result must not depend on the order of threads (see runtime.h).
#pragma once

#include <array>
#include <bit>
#include <cstring>
#include <memory>
#include <span>
#include <tuple>
#include <type_traits>
#include <utility>

#include "tests/simt/intrinsics.h"
#include "tests/simt/runtime.h"
#include "tests/simt/vector_types.h"

#ifdef GRADWIRE_STANDIN
#include "tests/standin/launch.h"
#elif !defined(__SANITIZE_ADDRESS__)
#error "tests/simt needs GCC's AddressSanitizer to find memory errors: compile with -fsanitize=address"
#endif

#define __global__
#define __device__
#define __host__
#define __constant__ static const
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)
#define __align__(bytes) __attribute__((aligned(bytes)))
#ifdef GRADWIRE_STANDIN
#define __shared__ static
#else
#define __shared__                                                                  \
  [] {                                                                              \
    static constinit ::gradwire::simt::SharedSite gw_simt_site{__FILE__, __LINE__}; \
    gw_simt_site.enter();                                                           \
  }();                                                                              \
  static
#endif
#define GW_DYNAMIC_SHARED(type, name) type* name = static_cast<type*>(::gradwire::simt::dynamic_shared())

using cudaStream_t = struct CUstream_st*;

// --- collectives ---

#define GW_SIMT_HERE ::gradwire::simt::Where where = {__builtin_FILE(), __builtin_LINE()}

inline void __syncthreads(GW_SIMT_HERE) {
  ::gradwire::simt::block_collective(::gradwire::simt::Op::sync_block, true, where);
}
inline int __syncthreads_and(int predicate, GW_SIMT_HERE) {
  return ::gradwire::simt::block_collective(::gradwire::simt::Op::sync_block_and, predicate != 0, where);
}
inline int __syncthreads_or(int predicate, GW_SIMT_HERE) {
  return ::gradwire::simt::block_collective(::gradwire::simt::Op::sync_block_or, predicate != 0, where);
}
inline int __syncthreads_count(int predicate, GW_SIMT_HERE) {
  return ::gradwire::simt::block_collective(::gradwire::simt::Op::sync_block_count, predicate != 0, where);
}
inline void __syncwarp(unsigned mask = 0xffffffffu, GW_SIMT_HERE) {
  ::gradwire::simt::warp_collective(::gradwire::simt::Op::sync_warp, mask, 0, 0, where);
}

#define GW_SIMT_VOTE(name, op, Result)                                                                 \
  inline Result name(unsigned mask, int predicate, GW_SIMT_HERE) {                                     \
    return static_cast<Result>(::gradwire::simt::warp_collective(::gradwire::simt::Op::op, mask,       \
                                                                 predicate != 0 ? 1u : 0u, 0, where)); \
  }
GW_SIMT_VOTE(__ballot_sync, ballot, unsigned)
GW_SIMT_VOTE(__any_sync, any, int)
GW_SIMT_VOTE(__all_sync, all, int)
#undef GW_SIMT_VOTE

#define GW_SIMT_REDUCE(name, op, T)                                                                   \
  inline T name(unsigned mask, T value, GW_SIMT_HERE) {                                               \
    return static_cast<T>(::gradwire::simt::warp_collective(::gradwire::simt::Op::op, mask,           \
                                                            static_cast<uint32_t>(value), 0, where)); \
  }
GW_SIMT_REDUCE(__reduce_add_sync, add_signed, int)
GW_SIMT_REDUCE(__reduce_add_sync, add_unsigned, unsigned)
GW_SIMT_REDUCE(__reduce_min_sync, min_signed, int)
GW_SIMT_REDUCE(__reduce_min_sync, min_unsigned, unsigned)
GW_SIMT_REDUCE(__reduce_max_sync, max_signed, int)
GW_SIMT_REDUCE(__reduce_max_sync, max_unsigned, unsigned)
GW_SIMT_REDUCE(__reduce_and_sync, bit_and, unsigned)
GW_SIMT_REDUCE(__reduce_or_sync, bit_or, unsigned)
GW_SIMT_REDUCE(__reduce_xor_sync, bit_xor, unsigned)
#undef GW_SIMT_REDUCE

// Returns all lanes that have not returned. CUDA does not specify which lanes run together.
inline unsigned __activemask() {
  return ::gradwire::simt::lanes_alive();
}

namespace gradwire::simt {

// Converts a value to a word. Uses bit_cast, because with AddressSanitizer, taking a local variable's address
// adds a stack frame to the most frequently called functions.
template <typename T>
uint64_t to_word(T value) {
  static_assert(std::is_arithmetic_v<T> && (sizeof(T) == 4 || sizeof(T) == 8),
                "shuffles move 4- or 8-byte numbers");
  if constexpr (sizeof(T) == 4)
    return std::bit_cast<uint32_t>(value);
  else
    return std::bit_cast<uint64_t>(value);
}

// Returns the value of lane `source`. `valid` says whether that lane is in the caller's segment; otherwise
// the lane reads its own value.
template <typename T>
T shuffle(unsigned mask, T value, int source, bool valid, Where where) {
  constexpr Op op = sizeof(T) == 4 ? Op::shuffle4 : Op::shuffle8;
  uint64_t word = warp_collective(op, mask, to_word(value), valid ? source : lane_id(), where);
  if constexpr (sizeof(T) == 4)
    return std::bit_cast<T>(static_cast<uint32_t>(word));
  else
    return std::bit_cast<T>(word);
}

// Fails with a message about an invalid width. Not inlined, because its text would give AddressSanitizer a
// frame to poison in every shuffle.
[[noreturn, gnu::noinline]] inline void refuse_width(int width) {
  fail("shuffle with width " + std::to_string(width) + "; it must be a power of two up to 32");
}
inline int segment(int width) {
  if (width < 1 || width > 32 || (width & (width - 1)) != 0) refuse_width(width);
  return lane_id() & ~(width - 1);
}

}  // namespace gradwire::simt

template <typename T>
T __shfl_sync(unsigned mask, T value, int lane, int width = 32, GW_SIMT_HERE) {
  int begin = ::gradwire::simt::segment(width);
  return ::gradwire::simt::shuffle(mask, value, begin | (lane & (width - 1)), true, where);
}
template <typename T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32, GW_SIMT_HERE) {
  int begin = ::gradwire::simt::segment(width),
      source = ::gradwire::simt::lane_id() - static_cast<int>(delta & 31u);
  return ::gradwire::simt::shuffle(mask, value, source, source >= begin, where);
}
template <typename T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32, GW_SIMT_HERE) {
  int begin = ::gradwire::simt::segment(width),
      source = ::gradwire::simt::lane_id() + static_cast<int>(delta & 31u);
  return ::gradwire::simt::shuffle(mask, value, source, source < begin + width, where);
}
template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int lane_mask, int width = 32, GW_SIMT_HERE) {
  int begin = ::gradwire::simt::segment(width), source = ::gradwire::simt::lane_id() ^ (lane_mask & 31);
  return ::gradwire::simt::shuffle(mask, value, source, source < begin + width, where);
}
template <typename T>
unsigned __match_any_sync(unsigned mask, T value, GW_SIMT_HERE) {
  return static_cast<unsigned>(::gradwire::simt::warp_collective(::gradwire::simt::Op::match_any, mask,
                                                                 ::gradwire::simt::to_word(value), 0, where));
}
template <typename T>
unsigned __match_all_sync(unsigned mask, T value, int* all_equal, GW_SIMT_HERE) {
  auto lanes = static_cast<unsigned>(::gradwire::simt::warp_collective(
      ::gradwire::simt::Op::match_all, mask, ::gradwire::simt::to_word(value), 0, where));
  *all_equal = lanes != 0;
  return lanes;
}
#undef GW_SIMT_HERE

// --- atomics ---

// Defines an atomic operation as a plain update, since one thread runs at a time. Another thread may run
// after the update. Overloads exist for CUDA's types only, so a 64-bit `unsigned long`, which nvcc would
// reject, is also rejected here.
#define GW_SIMT_ATOMIC(name, T, expression) \
  inline T name(T* address, T value) {      \
    T old = *address;                       \
    *address = static_cast<T>(expression);  \
    ::gradwire::simt::preempt();            \
    return old;                             \
  }
#define GW_SIMT_ATOMIC_INTEGERS(name, expression) \
  GW_SIMT_ATOMIC(name, int, expression)           \
  GW_SIMT_ATOMIC(name, unsigned, expression)      \
  GW_SIMT_ATOMIC(name, unsigned long long, expression)
GW_SIMT_ATOMIC(atomicAdd, int, static_cast<unsigned>(old) + static_cast<unsigned>(value))
GW_SIMT_ATOMIC(atomicAdd, unsigned, old + value)
GW_SIMT_ATOMIC(atomicAdd, unsigned long long, old + value)
GW_SIMT_ATOMIC(atomicAdd, float, old + value)
GW_SIMT_ATOMIC(atomicAdd, double, old + value)
GW_SIMT_ATOMIC(atomicSub, int, static_cast<unsigned>(old) - static_cast<unsigned>(value))
GW_SIMT_ATOMIC(atomicSub, unsigned, old - value)
GW_SIMT_ATOMIC_INTEGERS(atomicMin, value < old ? value : old)
GW_SIMT_ATOMIC_INTEGERS(atomicMax, value > old ? value : old)
GW_SIMT_ATOMIC_INTEGERS(atomicAnd, old& value)
GW_SIMT_ATOMIC_INTEGERS(atomicOr, old | value)
GW_SIMT_ATOMIC_INTEGERS(atomicXor, old ^ value)
GW_SIMT_ATOMIC_INTEGERS(atomicExch, value)
GW_SIMT_ATOMIC(atomicExch, float, value)
// Counts up to `value` and then restarts at 0.
GW_SIMT_ATOMIC(atomicInc, unsigned, old >= value ? 0u : old + 1u)
#undef GW_SIMT_ATOMIC
#undef GW_SIMT_ATOMIC_INTEGERS

#define GW_SIMT_CAS(T)                                    \
  inline T atomicCAS(T* address, T expected, T desired) { \
    T old = *address;                                     \
    if (old == expected) *address = desired;              \
    ::gradwire::simt::preempt();                          \
    return old;                                           \
  }
GW_SIMT_CAS(int)
GW_SIMT_CAS(unsigned)
GW_SIMT_CAS(unsigned long long)
#undef GW_SIMT_CAS

inline void __threadfence() {}
inline void __threadfence_block() {}
inline void __threadfence_system() {}
inline void __nanosleep(unsigned) {
  ::gradwire::simt::preempt();
}
[[noreturn]] inline void __trap() {
  ::gradwire::simt::fail("__trap()");
}

// --- launch ---

namespace gradwire::simt {

// Calls kernel(params...) for every thread of the grid. Each thread has its own copy of the parameters, as on
// a GPU. Streams exist only in tests/standin; elsewhere the launch has ended on return.
template <typename... Params>
void launch(const char* name, void (*kernel)(Params...), dim3 grid, dim3 block, size_t shared_bytes,
            [[maybe_unused]] cudaStream_t stream, std::tuple<Params...> params) {
  static_assert((std::is_trivially_copyable_v<Params> && ...), "kernel parameters are copied byte by byte");
  static_assert((!std::is_reference_v<Params> && ...), "a reference parameter would point to host memory");
  static_assert((sizeof(Params) + ... + 0) <= 32764, "CUDA passes at most 32764 bytes of parameters");
  struct Call {
    void (*kernel)(Params...);
    std::tuple<Params...> params;
  };
  const auto call = std::make_shared<const Call>(Call{kernel, std::move(params)});
  auto thread = [](const void* arguments) {
    const auto& c = *static_cast<const Call*>(arguments);
    std::apply(c.kernel, c.params);
  };
#ifdef GRADWIRE_STANDIN
  const auto* const address = reinterpret_cast<const void*>(kernel);
  standin::launch({name,
                   address,
                   {grid.x, grid.y, grid.z},
                   {block.x, block.y, block.z},
                   shared_bytes,
                   stream,
                   [name = std::string(name), address, grid, block, shared_bytes, thread, call] {
                     run_grid({name.c_str(), address, grid, block, shared_bytes}, thread, call.get());
                   }});
#else
  auto parameters = std::apply(
      [](const Params&... p) {
        return std::array<std::span<const std::byte>, sizeof...(Params)>{std::as_bytes(std::span(&p, 1))...};
      },
      call->params);
  run({name, reinterpret_cast<const void*>(kernel), grid, block, shared_bytes}, thread, call.get(),
      parameters);
#endif
}

}  // namespace gradwire::simt
