// Block formats in an allreduce over peer access (fused.h).
#include "kernels/wire/block.cuh"
#include "kernels/wire/fused.cuh"

namespace gradwire::cuda {
namespace {

// A queue of wire tiles in shared memory: kBlockReadsAhead tiles are in flight while the thread block uses
// another tile. Order: for each tile of the thread block, the encodings of all inputs.
template <typename F, typename Inputs>
class WireQueue {
 public:
  __device__ __forceinline__ WireQueue(const Worker<F>& w, const Inputs& inputs, int64_t all,
                                       unsigned char* slots)
      : w_(w), inputs_(inputs), slots_(slots), all_(all), tile_(int64_t{blockIdx.x} * w.shape.blocks) {
    if (inputs_.count() == 0) tile_ = all_;
    __syncthreads();  // the previous part has finished with the slots
#pragma unroll 1
    for (int k = 0; k < kBlockReadsAhead; ++k) begin();
  }

  // Returns the next input's bytes of the worker's tile, valid until the next call. Called by all threads of
  // the block.
  __device__ __forceinline__ const uint8_t* operator()(const void*) {
    wait_for_groups<kBlockReadsAhead - 1>();
    __syncthreads();  // all threads' copies have arrived, and the previous bytes are no longer in use
    begin();
    const uint8_t* const bytes = slot(used_) + skew(w_.first_block);
    used_ = after(used_);
    return bytes;
  }

 private:
  __device__ __forceinline__ uint8_t* slot(int k) const {
    return slots_ + k * w_.shape.slot_bytes();
  }
  __device__ __forceinline__ int skew(int64_t first) const {
    return static_cast<int>(first * w_.shape.bytes % 16);
  }
  __device__ __forceinline__ static int after(int k) {
    return k == kBlockReadsAhead ? 0 : k + 1;
  }
  __device__ __forceinline__ void begin() {
    if (tile_ < all_) {
      const int blocks = all_ - tile_ < w_.shape.blocks ? static_cast<int>(all_ - tile_) : w_.shape.blocks;
      const int before = skew(tile_);  // encoded chunks are padded to 16 bytes
      const int pieces = (before + blocks * w_.shape.bytes + 15) / 16;
      const uint8_t* const from =
          static_cast<const uint8_t*>(inputs_(input_)) + tile_ * w_.shape.bytes - before;
      uint8_t* const to = slot(begun_);
      for (int i = static_cast<int>(threadIdx.x); i < pieces; i += kBlockThreads)
        begin_copy<16>(to + 16 * i, from + 16 * i);
      if (++input_ == inputs_.count()) {
        input_ = 0;
        tile_ += int64_t{gridDim.x} * w_.shape.blocks;
      }
    }
    end_group();
    begun_ = after(begun_);
  }

  const Worker<F>& w_;
  const Inputs inputs_;
  unsigned char* const slots_;
  const int64_t all_;
  int64_t tile_;  // first block of the next tile to read
  int input_ = 0, begun_ = 0, used_ = 0;
};

struct PartInputs {
  const FusedPart& a;
  __device__ __forceinline__ int count() const { return a.num_inputs; }
  __device__ __forceinline__ const void* operator()(int k) const { return a.input(k); }
};
struct DecodeInput {
  const Decode& a;
  __device__ __forceinline__ static int count() { return 1; }
  __device__ __forceinline__ const void* operator()(int) const { return a.wire; }
};

// True if tiles are read ahead. False for topk, whose blocks need up to 24 KB.
template <typename F>
inline constexpr bool kQueues = std::is_same_v<LanesFor<F>, WarpLanes>;

template <typename F>
struct BlockTiles {
  static constexpr int kThreads = kBlockThreads, kBlocks = 1;
  static constexpr bool kExact = false;
  static constexpr size_t kSharedBytes = 0;
  struct Form {
    BlockCoder<F> coder;
    TileShape shape;
    bool wide;  // the caller's arrays allow 16-byte accesses
  };
  const Form& form;
  unsigned char* shared_bytes;
  __device__ __forceinline__ BlockTiles(const Form& its_form, const FusedAllreduce&) : form(its_form) {
    GW_DYNAMIC_SHARED(unsigned char, shared);
    shared_bytes = shared;
  }
  __device__ __forceinline__ int64_t tile() const { return int64_t{form.shape.blocks} * form.shape.block; }
  __device__ __forceinline__ void reduce_encode(const FusedPart& a) const {
    Worker<F> w(form.coder, form.shape, a.count, form.wide, shared_bytes);
    if constexpr (kQueues<F>) {
      reduce_encode_tiles(w, a, queue(w, PartInputs{a}, a.count));
    } else {
      reduce_encode_tiles(w, a, Fetch{w});
    }
  }
  __device__ __forceinline__ void decode(const Decode& a) const {
    Worker<F> w(form.coder, form.shape, a.count, form.wide, shared_bytes);
    if constexpr (kQueues<F>) {
      decode_tiles(w, a, queue(w, DecodeInput{a}, a.count));
    } else {
      decode_tiles(w, a, Fetch{w});
    }
  }

 private:
  template <typename Inputs>
  __device__ __forceinline__ WireQueue<F, Inputs> queue(const Worker<F>& w, const Inputs& inputs,
                                                        int64_t count) const {
    return {w, inputs, form.coder.blocks(count), shared_bytes + form.shape.slots_offset()};
  }
};

template <typename F>
void launch_blocks(const char* name, CudaStream stream, const BlockCoder<F>& coder, const FusedAllreduce& a) {
  const TileShape shape = shape_of(coder);
  launch_fused<BlockTiles<F>>(
      name, stream, a, {coder, shape, aligned(a.in, a.out, a.residual)}, int64_t{shape.blocks} * shape.block,
      kQueues<F> ? shape.slots_offset() + (kBlockReadsAhead + 1) * shape.slot_bytes() : shape.shared_bytes());
}

}  // namespace

#define GW_DEFINE(F, NAME)                                                                                 \
  void NAME##_fused_allreduce(CudaStream stream, const BlockCoder<F>& coder, const FusedAllreduce& call) { \
    launch_blocks(#NAME "_fused_allreduce", stream, coder, call);                                          \
  }
GW_BLOCK_FORMATS(GW_DEFINE)
#undef GW_DEFINE

}  // namespace gradwire::cuda
