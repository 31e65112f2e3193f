// An allreduce over peer memory (fused.h) with formats in blocks.
#include "kernels/wire/block.cuh"
#include "kernels/wire/fused.cuh"

namespace gradwire::cuda {
namespace {

template <typename F>
struct BlockTiles {
  static constexpr int kThreads = kBlockThreads, kBlocks = 1;
  static constexpr bool kExact = false;
  struct Form {
    BlockCoder<F> coder;
    TileShape shape;
    bool wide;  // the caller's arrays take 16-byte accesses
  };
  const Form& form;
  unsigned char* shared_bytes;
  __device__ __forceinline__ BlockTiles(const Form& its_form, const FusedAllreduce&) : form(its_form) {
    GW_DYNAMIC_SHARED(unsigned char, shared);
    shared_bytes = shared;
  }
  __device__ __forceinline__ int64_t tile() const { return int64_t{form.shape.blocks} * form.shape.block; }
  __device__ __forceinline__ void reduce_encode(const FusedPart& a) const {
    reduce_encode_tiles(form.coder, form.shape, a, form.wide, shared_bytes);
  }
  __device__ __forceinline__ void decode(const Decode& a) const {
    decode_tiles(form.coder, form.shape, a, form.wide, shared_bytes);
  }
};

template <typename F>
void launch_blocks(const char* name, CudaStream stream, const BlockCoder<F>& coder, const FusedAllreduce& a) {
  const TileShape shape = shape_of(coder);
  launch_fused<BlockTiles<F>>(name, stream, a, {coder, shape, aligned(a.in, a.out, a.residual)},
                              int64_t{shape.blocks} * shape.block, shape.shared_bytes());
}

}  // namespace

#define GW_DEFINE(F, NAME)                                                                                 \
  void NAME##_fused_allreduce(CudaStream stream, const BlockCoder<F>& coder, const FusedAllreduce& call) { \
    launch_blocks(#NAME "_fused_allreduce", stream, coder, call);                                          \
  }
GW_BLOCK_FORMATS(GW_DEFINE)
#undef GW_DEFINE

}  // namespace gradwire::cuda
