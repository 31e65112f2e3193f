// The ops of the block formats on CUDA (block.cuh).
//
// Bytes per element: as in kernels/wire/format.h. Limit: memory bandwidth. Alignment: any for floats, 16-byte
// alignment is fast. Deterministic: a value depends on its block only.
#include "kernels/wire/block.cuh"

namespace gradwire::cuda {
namespace {

template <typename F>
__global__ void __launch_bounds__(kBlockThreads, 3)
    block_reduce_encode_kernel(const __grid_constant__ BlockCoder<F> coder,
                               const __grid_constant__ TileShape shape,
                               const __grid_constant__ ReduceEncode a, bool wide) {
  GW_DYNAMIC_SHARED(unsigned char, shared);
  Worker<F> w(coder, shape, a.count, wide, shared);
  reduce_encode_tiles(w, a, Fetch<F>{w});
}

template <typename F>
__global__ void __launch_bounds__(kBlockThreads, 3)
    block_decode_kernel(const __grid_constant__ BlockCoder<F> coder, const __grid_constant__ TileShape shape,
                        const __grid_constant__ Decode a, bool wide) {
  GW_DYNAMIC_SHARED(unsigned char, shared);
  Worker<F> w(coder, shape, a.count, wide, shared);
  decode_tiles(w, a, Fetch<F>{w});
}

template <typename Kernel>
LaunchConfig config_for(Kernel* kernel, const TileShape& shape, int64_t count, CudaStream stream) {
  return {.grid = dim3(grid_for(kernel, count, int64_t{shape.blocks} * shape.block, kBlockThreads,
                                shape.shared_bytes())),
          .block = dim3(kBlockThreads),
          .shared_bytes = shape.shared_bytes(),
          .stream = stream};
}

}  // namespace

#define GW_DEFINE(F, NAME)                                                                               \
  void NAME##_reduce_encode(CudaStream stream, const BlockCoder<F>& coder, const ReduceEncode& a) {      \
    const TileShape shape = shape_of(coder);                                                             \
    launch(#NAME "_reduce_encode", block_reduce_encode_kernel<F>,                                        \
           config_for(block_reduce_encode_kernel<F>, shape, a.count, stream), coder, shape, a,           \
           aligned(a.own, a.residual, a.out));                                                           \
  }                                                                                                      \
  void NAME##_decode(CudaStream stream, const BlockCoder<F>& coder, const Decode& a) {                   \
    const TileShape shape = shape_of(coder);                                                             \
    launch(#NAME "_decode", block_decode_kernel<F>,                                                      \
           config_for(block_decode_kernel<F>, shape, a.count, stream), coder, shape, a, aligned(a.out)); \
  }
GW_BLOCK_FORMATS(GW_DEFINE)
#undef GW_DEFINE

}  // namespace gradwire::cuda
