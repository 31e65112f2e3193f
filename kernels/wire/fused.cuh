// The kernel of an allreduce over peer access (fused.h), for any format.
//
// A format supplies Tiles, which process this thread block's part of a chunk: the tiles of fixed size whose
// number, modulo the grid, is the block's. The tiles must not depend on alignment, which differs between
// ranks.
//   struct Tiles {
//     static constexpr int kThreads, kBlocks;  // threads per block; least resident blocks per multiprocessor
//     static constexpr bool kExact;            // the wire is the floats: no residual, no random bits
//     static constexpr size_t kSharedBytes;    // per block, besides the shared_bytes of launch_fused()
//     struct Form;                             // further kernel arguments
//     Tiles(const Form&, const FusedAllreduce&);
//     int64_t tile() const;                    // values in a tile
//     void reduce_encode(const FusedPart&) const;
//     void decode(const Decode&) const;
//   };
#pragma once

#include "kernels/cuda/peer_barrier.cuh"
#include "kernels/cuda/read_ahead.cuh"
#include "kernels/cuda/vector.cuh"
#include "kernels/wire/fused.h"
#include "kernels/wire/reduce_encode.cuh"

namespace gradwire::cuda {

// A ReduceEncode whose inputs are at the same offset in the peer memory of all ranks except one. With an
// exact format, `wire` is a second place for the result.
struct FusedPart {
  std::byte* const* windows = nullptr;  // peer memory of all ranks; the array is in shared memory
  int64_t place = 0;                    // offset in each window
  int without = 0;                      // this rank's window
  int num_inputs = 0;
  int own_position = 0;
  const float* own = nullptr;
  float own_scale = 1.0f, part_scale = 1.0f;
  static constexpr float residual_scale = 1.0f;
  float* residual = nullptr;
  void* wire = nullptr;
  float* out = nullptr;
  float out_scale = 1.0f;
  int64_t count = 0;
  WireRounding rounding = {};
  __device__ __forceinline__ const void* input(int k) const {
    return windows[k < without ? k : k + 1] + place;
  }
  __device__ __forceinline__ float input_scale(int) const { return part_scale; }
};

// The reads of ReadAhead for a vector of a part: `own`, `residual`, `inputs`. Format begins the copies of
// floats and encoded values.
template <typename Format>
struct PartReads : Format {
  const FusedPart& a;
  __device__ __forceinline__ explicit PartReads(const FusedPart& part) : a(part) {}
  __device__ __forceinline__ int floats() const { return Format::kResidual && a.residual != nullptr ? 2 : 1; }
  __device__ __forceinline__ int items() const { return floats() + a.num_inputs; }
  __device__ __forceinline__ void begin(const Pieces& to, int item, int64_t vector) const {
    const int input = item - floats();
    if (input >= 0) {
      Format::begin_wire(to, a.input(input), a.count, vector);
    } else {
      Format::begin_floats(to, item == 0 ? a.own : a.residual, vector);
    }
  }
};

// The reads of ReadAhead for decoding a vector.
template <typename Format>
struct WireReads : Format {
  const Decode& a;
  __device__ __forceinline__ explicit WireReads(const Decode& decode) : a(decode) {}
  __device__ __forceinline__ static int items() { return 1; }
  __device__ __forceinline__ void begin(const Pieces& to, int, int64_t vector) const {
    Format::begin_wire(to, a.wire, a.count, vector);
  }
};

// Base class of Tiles that read ahead. Reads: the same as the Format of PartReads.
template <typename Reads>
struct TilesAhead {
  static constexpr int kThreads = kVectorThreads, kBlocks = 2;
  static constexpr size_t kSharedBytes = ReadAhead<PartReads<Reads>>::kSharedBytes;
  struct Form {
    bool wide;  // the caller's arrays allow 16-byte accesses
  };
  bool wide;
  unsigned char* shared_bytes;
  __device__ __forceinline__ explicit TilesAhead(const Form& form) : wide(form.wide) {
    GW_DYNAMIC_SHARED(unsigned char, shared);
    shared_bytes = shared;
  }
};

// Does the same as for_each_vector() of vector.cuh, in tiles of kVectorThreads * W elements: calls
// body.at<W>(i, Queued) for vectors, body.at<1>(i, Direct) for single elements.
template <int W, typename Reads, typename Body>
__device__ __forceinline__ void for_each_in_tiles(bool wide, int64_t count, const Body& body,
                                                  const Reads& reads, unsigned char* shared) {
  constexpr int64_t kTile = int64_t{kVectorThreads} * W;
  const int64_t vectors = wide ? usable_vectors<W>(count / W) : 0;
  const int64_t first = int64_t{blockIdx.x} * kVectorThreads + threadIdx.x,
                stride = int64_t{gridDim.x} * kVectorThreads;
  ReadAhead<Reads> ahead(reads, shared, first, stride, vectors);
  for (int64_t v = first; v < vectors; v += stride) {
    body.template at<W>(vector_begin<W>(v), typename Reads::template Queued<ReadAhead<Reads>>{ahead});
  }
  int64_t tile = vectors * W / kTile;  // the first tile with single elements
  tile += (int64_t{blockIdx.x} - tile % gridDim.x + gridDim.x) % gridDim.x;
  for (; tile * kTile < count; tile += gridDim.x) {
    const int64_t begin = vectors * W > tile * kTile ? vectors * W : tile * kTile;
    const int64_t end = count < (tile + 1) * kTile ? count : (tile + 1) * kTile;
    for (int64_t i = begin + threadIdx.x; i < end; i += kVectorThreads) {
      body.template at<1>(i, typename Reads::Direct{i});
    }
  }
}

template <typename Tiles>
class FusedSteps {
 public:
  __device__ __forceinline__ FusedSteps(const FusedAllreduce& call, std::byte* const* windows, int64_t half)
      : a_(call), windows_(windows), half_(half) {}

  // Returns the chunk of the rank k steps to the right, so that ranks do not all start with the same peer.
  __device__ __forceinline__ int chunk(int k) const {
    const int c = a_.peers.rank + k;
    return c < a_.peers.world ? c : c - a_.peers.world;
  }

  // Returns this rank's part of a chunk or, with `others`, the sum of all ranks' parts.
  __device__ __forceinline__ FusedPart part(int c, bool others) const {
    const int64_t begin = a_.begin[c];
    const int rank = a_.peers.rank;
    FusedPart p{.windows = windows_};
    p.own = a_.in + begin;
    p.residual = Tiles::kExact || a_.residual == nullptr ? nullptr : a_.residual + begin;
    p.wire = wire(rank, c);
    p.count = a_.begin[c + 1] - begin;
    p.rounding = a_.rounding;
    p.rounding.first_element += begin;
    if (!others) return p;
    p.place = half_ + a_.offset[c];
    p.num_inputs = a_.peers.world - 1;
    p.own_scale = p.part_scale = a_.part_scale;
    p.without = p.own_position = Tiles::kExact ? rank : c;
    p.out = a_.out + begin;
    p.out_scale = a_.scale;
    if (!a_.one_shot) return p;
    if constexpr (Tiles::kExact) {
      p.wire = nullptr;
    } else {
      p.wire = windows_[rank] + half_ + a_.scratch + a_.offset[c];
      if (c != rank) {
        p.own = exported(c);
        p.residual = nullptr;
        p.rounding.seed = a_.seeds[c];
      }
    }
    return p;
  }

  // In a one-shot, exports this rank's term of its chunk's sum to the other ranks.
  __device__ __forceinline__ void export_own(int64_t tile) const {
    const FusedPart p = part(a_.peers.rank, false);
    float* const to = exported(a_.peers.rank);
    for (int64_t begin = blockIdx.x * tile; begin < p.count; begin += gridDim.x * tile) {
      const int64_t end = begin + tile < p.count ? begin + tile : p.count;
      for (int64_t i = begin + threadIdx.x; i < end; i += Tiles::kThreads) {
        to[i] = p.residual != nullptr ? p.own[i] + p.residual[i] : p.own[i];
      }
    }
  }

  // In a one-shot, resets the residual of another rank's chunk as Decode does.
  __device__ __forceinline__ void forget_not_finite_of(int c, int64_t tile) const {
    if (a_.residual == nullptr) return;
    __syncthreads();  // results of this block's tiles were written by other threads
    const int64_t count = a_.begin[c + 1] - a_.begin[c];
    for (int64_t begin = blockIdx.x * tile; begin < count; begin += gridDim.x * tile) {
      const int64_t end = begin + tile < count ? begin + tile : count;
      for (int64_t i = a_.begin[c] + begin + threadIdx.x; i < a_.begin[c] + end; i += Tiles::kThreads) {
        if (!is_finite(a_.out[i])) a_.residual[i] = 0.0f;
      }
    }
  }

  __device__ __forceinline__ Decode result(int c) const {
    return {.wire = wire(c, c),
            .out = a_.out + a_.begin[c],
            .scale = Tiles::kExact ? 1.0f : a_.scale,  // with an exact format the owner has scaled the sum
            .count = a_.begin[c + 1] - a_.begin[c],
            .residual = Tiles::kExact || a_.residual == nullptr ? nullptr : a_.residual + a_.begin[c]};
  }

 private:
  __device__ __forceinline__ std::byte* wire(int rank, int c) const {
    return windows_[rank] + half_ + a_.offset[c];
  }
  __device__ __forceinline__ float* exported(int rank) const {
    return reinterpret_cast<float*>(windows_[rank] + half_ + a_.exported);
  }
  const FusedAllreduce& a_;
  std::byte* const* windows_;
  const int64_t half_;
};

template <typename Tiles>
__global__ void __launch_bounds__(Tiles::kThreads, Tiles::kBlocks)
    fused_allreduce_kernel(const __grid_constant__ FusedAllreduce a,
                           const __grid_constant__ typename Tiles::Form form) {
  // The addresses of all ranks' peer memory. Indexing kernel parameters is slower.
  __shared__ std::byte* windows[kMostPeers];
  const int world = a.peers.world;
  for (int r = static_cast<int>(threadIdx.x); r < world; r += Tiles::kThreads)
    windows[r] = a.peers.windows[r];
  __syncthreads();
  const Tiles tiles(form, a);
  const PeerBarrier barrier(a.peers);
  const FusedSteps<Tiles> steps(a, windows, barrier.half());
  // A single loop instantiates the format's code once; this code is the largest part of the kernel.
#pragma unroll 1
  for (int sums = 0; sums < 2; ++sums) {
    const int end = sums == 0 || a.one_shot ? world : 1;
#pragma unroll 1
    for (int k = sums == 0 && !(a.one_shot && Tiles::kExact) ? 1 : 0; k < end; ++k) {
      tiles.reduce_encode(steps.part(steps.chunk(k), sums != 0));
      if (!Tiles::kExact && sums != 0 && k > 0) steps.forget_not_finite_of(steps.chunk(k), tiles.tile());
    }
    if (sums != 0) break;
    if (!Tiles::kExact && a.one_shot) steps.export_own(tiles.tile());
    if (!barrier.wait(0)) return;
  }
  if (!a.one_shot) {
    if (!barrier.wait(1)) return;
#pragma unroll 1
    for (int k = 1; k < world; ++k) tiles.decode(steps.result(steps.chunk(k)));
  }
  barrier.end_call();
}

template <typename Tiles>
void launch_fused(const char* name, CudaStream stream, const FusedAllreduce& call,
                  const typename Tiles::Form& form, int64_t tile, size_t shared_bytes = 0) {
  int64_t most = 0;
  for (int c = 0; c < call.peers.world; ++c) {
    const int64_t count = call.begin[c + 1] - call.begin[c];
    most = count > most ? count : most;
  }
  // The number of blocks is the same on all ranks, whose GPUs are of one kind. There is at least one block,
  // because the barriers of every rank need it.
  const int64_t tiles = most > tile ? (most + tile - 1) / tile : 1;
  int64_t blocks = multiprocessors() < call.peers.blocks ? multiprocessors() : call.peers.blocks;
  blocks = tiles < blocks ? tiles : blocks;
  launch(name, fused_allreduce_kernel<Tiles>,
         {.grid = dim3(static_cast<unsigned>(blocks)),
          .block = dim3(Tiles::kThreads),
          .shared_bytes = Tiles::kSharedBytes + shared_bytes,
          .stream = stream},
         call, form);
}

}  // namespace gradwire::cuda
