// The ops of the block formats on CUDA (block.cuh).
//
// Bytes per element: as in kernels/wire/format.h. Limit: memory bandwidth. Alignment: any for floats, 16-byte
// alignment is fast. Deterministic: a value depends on its block only.
#include "kernels/wire/block.cuh"
#include "kernels/wire/block_registers.cuh"

namespace gradwire::cuda {
namespace {

template <typename F>
__global__ void __launch_bounds__(kBlockThreads, F::kStochastic ? 4 : 3)
    block_reduce_encode_kernel(const __grid_constant__ BlockCoder<F> coder,
                               const __grid_constant__ TileShape shape,
                               const __grid_constant__ ReduceEncode a, bool wide) {
  wait_for_earlier_kernels();
  GW_DYNAMIC_SHARED(unsigned char, shared);
  Worker<F> w(coder, shape, a.count, wide, shared);
  reduce_encode_tiles(w, a);
}

template <typename F>
__global__ void __launch_bounds__(kBlockThreads, 4)
    block_decode_kernel(const __grid_constant__ BlockCoder<F> coder, const __grid_constant__ TileShape shape,
                        const __grid_constant__ Decode a, bool wide) {
  wait_for_earlier_kernels();
  GW_DYNAMIC_SHARED(unsigned char, shared);
  Worker<F> w(coder, shape, a.count, wide, shared);
  decode_tiles(w, a);
}

// Calls body(w) with a worker; for each kind of an integer's scale separately, so that the compiler knows it.
template <typename F, typename Args, typename Body>
__device__ __forceinline__ void with_registers(BlockCoder<F> coder, const Args& a, bool wide,
                                               const Body& body) {
  GW_DYNAMIC_SHARED(unsigned char, shared);
  const auto run = [&] {
    RegisterWorker<F> w(coder, a.count, wide, shared);
    body(w);
  };
  if constexpr (requires(F f) { f.fp32_scale; }) {
    if (coder.format.fp32_scale != 0) return coder.format.fp32_scale = 1, run();
    coder.format.fp32_scale = 0;
  }
  run();
}
// The same for blocks of the default size.
template <typename F>
__global__ void __launch_bounds__(kBlockThreads, RegisterWorker<F>::kMinBlocks)
    register_reduce_encode_kernel(const __grid_constant__ BlockCoder<F> coder, TileShape,
                                  const __grid_constant__ ReduceEncode a, bool wide) {
  wait_for_earlier_kernels();
  with_registers(coder, a, wide, [&](RegisterWorker<F>& w) { reduce_encode_tiles(w, a); });
}

template <typename F>
__global__ void __launch_bounds__(kBlockThreads, 4)
    register_decode_kernel(const __grid_constant__ BlockCoder<F> coder, TileShape,
                           const __grid_constant__ Decode a, bool wide) {
  wait_for_earlier_kernels();
  with_registers(coder, a, wide, [&](RegisterWorker<F>& w) { decode_tiles(w, a); });
}

// Launches kernel_of(std::true_type()), the kernel in registers, if it supports the coder, otherwise
// kernel_of(std::false_type()). topk has no kernel in registers, and fp8 no other.
template <typename F, typename Args, typename KernelOf>
void launch_blocks(const char* name, CudaStream stream, const BlockCoder<F>& coder, const Args& a, bool wide,
                   const KernelOf& kernel_of) {
  const auto run = [&]<typename W>(const W*, auto* kernel) {
    const TileShape shape = W::shape_of(coder);
    const size_t shared_bytes = W::shared_bytes(shape);
    const unsigned grid =
        grid_for(kernel, a.count, int64_t{shape.blocks} * shape.block, kBlockThreads, shared_bytes);
    launch(name, kernel,
           {.grid = dim3(grid), .block = dim3(kBlockThreads), .shared_bytes = shared_bytes, .stream = stream},
           coder, shape, a, wide);
  };
  if constexpr (std::is_same_v<F, Fp8>) {
    run(static_cast<RegisterWorker<F>*>(nullptr), kernel_of(std::true_type()));
  } else {
    if constexpr (register_block<F>() > 0) {
      if (coder.block() == register_block<F>() && (F::kRotation != Rotation::optional || !coder.rotate))
        return run(static_cast<RegisterWorker<F>*>(nullptr), kernel_of(std::true_type()));
    }
    run(static_cast<Worker<F>*>(nullptr), kernel_of(std::false_type()));
  }
}

}  // namespace

template <typename F>
void reduce_encode(CudaStream stream, const BlockCoder<F>& coder, const ReduceEncode& a) {
  launch_blocks(kNames<F>.reduce_encode, stream, coder, a, aligned(a.own, a.residual, a.out),
                [](auto registers) {
                  if constexpr (registers)
                    return register_reduce_encode_kernel<F>;
                  else
                    return block_reduce_encode_kernel<F>;
                });
}
template <typename F>
void decode(CudaStream stream, const BlockCoder<F>& coder, const Decode& a) {
  launch_blocks(kNames<F>.decode, stream, coder, a, aligned(a.out), [](auto registers) {
    if constexpr (registers)
      return register_decode_kernel<F>;
    else
      return block_decode_kernel<F>;
  });
}

#define GW_DEFINE(F, NAME)                                                            \
  template void reduce_encode(CudaStream, const BlockCoder<F>&, const ReduceEncode&); \
  template void decode(CudaStream, const BlockCoder<F>&, const Decode&);
GW_BLOCK_FORMATS(GW_DEFINE)
#undef GW_DEFINE

}  // namespace gradwire::cuda
