// A codec averages the gradients of one bucket over the ranks while sending few bytes.
//
// BucketPipeline (pipeline.h) runs a bucket's steps. It averages the bucket in a wire format itself; another
// algorithm derives from Codec. To add a codec: construct it in make_codec(), and add its name to the spec
// grammar (spec.h). The reducer, the trainer, the conservation and bit-identity tests and the benchmarks then
// use the codec through its spec string.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "collectives/codec/residual.h"
#include "collectives/plan/planner.h"
#include "collectives/program/program.h"
#include "collectives/schedule/schedule.h"
#include "collectives/spec/spec.h"
#include "collectives/transport/transport.h"
#include "kernels/powersgd/powersgd.h"
#include "runtime/device/device.h"
#include "runtime/util/parse.h"

namespace gradwire {

// Kind of the residual of error feedback: FP32, shaped as the tensor. Only the sum over the ranks matters, so
// residuals are added up when the world shrinks, and a missing residual counts as zero.
inline constexpr const char* kResidualKind = "residual";

// A tensor's state in a codec between steps, for checkpoints (the C ABI's states, the trainer's files).
struct TensorState {
  int tensor = 0;  // index as registered with the reducer
  // Unique per tensor; letters, digits and '_': "residual", "factor".
  std::string kind = {};
  DType dtype = DType::f32;
  // Address of the state on the device; null: the state is stored in `residual` from element `first` on.
  void* data = nullptr;
  const Residual* residual = nullptr;
  int64_t first = 0;
  std::vector<int64_t> shape = {};  // for readers of a checkpoint
  // True if all ranks have the same bits, so that a checkpoint holds the state once. Otherwise the state
  // belongs to this rank and, except for residuals, is reset when the world size changes.
  bool same_on_all_ranks = false;

  int64_t count() const { return element_count(shape); }
  int64_t bytes() const { return count() * bytes_of(dtype); }

  // Enqueue a copy to host memory, and a copy from host memory. May be called only between steps. To restore
  // the bits that read() returned for every state of a reducer, clear all states and then write each state as
  // a whole.
  void read(const Stream& stream, size_t first_byte, std::span<std::byte> to) const;
  void write(const Stream& stream, size_t first_byte, std::span<const std::byte> from) const;
  void clear(const Stream& stream) const;
};

// Returns whether `world` ranks load this state, which `saved_world` ranks saved. If the world sizes differ,
// state that is neither replicated nor summable is reset.
inline bool is_loaded(const std::string& kind, bool same_on_all_ranks, int saved_world, int world) {
  return saved_world == world || same_on_all_ranks || kind == kResidualKind;
}
// Returns the ranks of the saved world whose residuals `rank` of `world` ranks adds up: rank, rank + world,
// ... So the sum over all ranks is unchanged. Empty for an additional rank.
std::vector<int> merged_ranks(int rank, int world, int saved_world);
// Adds a residual of `count` floats, at any address, to `sum`; an empty sum counts as zero.
void add_residual(std::vector<float>& sum, const void* residual, int64_t count);

// A tensor's position in a bucket.
struct BucketTensor {
  std::string name;
  // For PowerSGD: shape[0], and the product of the other extents (1 for a vector).
  int64_t rows = 0, cols = 0;
  int64_t offset = 0;  // offset of the first element, from the bucket's start
  int32_t index = 0;   // index in the whole model
  int64_t count() const { return rows * cols; }
};

// An allreduce (with shards, a reduce-scatter) of a bucket or of a part of it.
struct BucketAllreduce {
  SchedulePlanner::Choice choice = {};
  std::unique_ptr<Program> program = {};
};

struct BucketContext {
  Transport* transport = nullptr;
  CompressionSpec spec;
  Schedule schedule;                         // schedule of every allreduce, if there is no planner
  const SchedulePlanner* planner = nullptr;  // used only while the codec is constructed
  // [rank]: sizes of the shards of the bucket; empty: not sharded. With shards each rank needs only the mean
  // of its shard, so a codec may end with a reduce-scatter. Codecs with common factors or coordinates leave
  // the mean on every rank.
  Shards shards = {};
  const SchedulePlanner* scatter_planner = nullptr;  // for reduce-scatters
  Stream stream;  // for set-up work; a codec synchronizes it only in its constructor
  // The stream for exchanges that overlap with kernels, and the size of the slices (see Program::Options).
  // The exchanges on this stream are ordered with the exchanges on the stream given to run().
  Stream transfers;
  int64_t slice_bytes = 0;
  bool beside_others = false;  // other buckets run concurrently on another stream
  bool skip_unused = false;    // leave tensors alone that no rank used
  std::vector<BucketTensor> tensors;
  float* gradients = nullptr;      // address of the bucket; null if rebind() precedes the first run()
  int64_t elements = 0;            // elements of the bucket, including gaps between tensors
  int64_t first_element = 0;       // offset of the bucket in the model's flat gradient
  float scale = 1.0f;              // 1 / world for the mean
  uint64_t rounding_seed = 0;      // differs between ranks
  const uint64_t* step = nullptr;  // steps done so far, in device memory
  std::string name;                // for error texts
  // Plans an allreduce in this format. `part`: the part of the bucket, such as "Q"; "": the whole bucket.
  // `first`: the number of the buffers' first element in the sequence of random bits, from first_element on.
  BucketAllreduce allreduce(const std::string& part, Wire wire, const ProgramBuffers& buffers,
                            int64_t first = 0, bool sliced = true) const;
  // Returns a buffer that set-up work on `stream` fills with zeros.
  Buffer zeros(int64_t floats) const;
};

// The allreduces that a codec performs in each step, and what they average: "" for a codec's only allreduce.
using PlannedAllreduces = std::vector<std::pair<std::string, const SchedulePlanner::Choice*>>;

class Codec {
 public:
  virtual ~Codec() = default;

  // Return the size of the workspace in bytes, and set its address. The buckets of a stream share a
  // workspace. bind() is called once, before the first run().
  virtual size_t workspace_bytes() const = 0;
  virtual void bind(void* workspace) = 0;
  // Changes the address of the bucket's gradients, which keep their layout. None of the codec's work may be
  // in flight.
  virtual void rebind(float* gradients) = 0;
  // Enqueues one step on `stream`, which replaces the bucket's gradients by averaged gradients. `step` counts
  // from 0. Reports to `phases` the phase of the work on `stream`: compression, exchanges or decompression.
  virtual void run(const Stream& stream, int64_t step, BucketPhases& phases) = 0;
  // Returns the step from which run() enqueues the same work in every step, so that it can be captured in a
  // graph. Remaining differences between steps depend on BucketContext::step, on the device.
  virtual int64_t steady_from() const { return 0; }
  // Returns the period in steps of the enqueued work: 2 if two kinds of step alternate.
  virtual int64_t period() const { return 1; }

  // Returns the residual of error feedback; null without error feedback.
  virtual Residual* residual() { return nullptr; }
  // Returns all other state that outlives a step, by tensor (BucketTensor::index).
  virtual std::vector<TensorState> tensor_state() { return {}; }
  virtual int64_t state_bytes() const = 0;  // bytes of device memory besides gradients and workspace
  virtual std::string describe() const = 0;
  virtual PlannedAllreduces plan() const = 0;
};

// Returns the codec that the spec names, for all tensors of the context, including dense ones; null: the spec
// names a wire format.
std::unique_ptr<Codec> make_codec(const BucketContext& context);
std::unique_ptr<Codec> make_powersgd_codec(const BucketContext& context);
std::unique_ptr<Codec> make_randk_codec(const BucketContext& context);
// Returns the rank at which `powersgd` compresses a rows x cols tensor; 0: it stays dense. PyTorch's rule:
// compress if the factors are spec.min_ratio times smaller than the matrix; never vectors.
int powersgd_rank(const CompressionSpec& spec, int64_t rows, int64_t cols);

// Returns whether dense=auto means a tensor of this shape.
bool is_small(int64_t rows, int64_t cols);
// Returns whether the spec's dense= applies to the tensor.
bool is_dense(const CompressionSpec& spec, const BucketTensor& tensor);
// Throws BadInput if a name in the spec's dense= matches none of `tensors`: the names of all tensors of a
// model, not of one bucket.
void check_dense_names(const CompressionSpec& spec, const std::vector<std::string>& tensors);

// Returns the alignment, in elements, of tensors packed for a wire format; a multiple of `least`. Tensors
// begin at a block if a non-finite value would delay the finite values of its block.
int64_t packing_unit(Wire wire, int64_t least);
// Returns the positions of a bucket's tensors, packed one after another, each tensor at a multiple of `unit`
// elements. Omits empty tensors.
std::vector<Segment> pack_tensors(const std::vector<BucketTensor>& tensors, int64_t unit);
// Returns the number of elements that the segments of pack_tensors() occupy.
int64_t packed_elements(const std::vector<Segment>& segments, int64_t unit);

// Lists of specs for benchmarks and `gradwire compare --compression shelf`. Wire formats are included
// automatically. The practical choices of a new codec must be added here.

// Returns every wire format with default options and, if supported, with stochastic rounding.
inline std::vector<std::string> format_specs() {
  std::vector<std::string> all;
  for (Wire wire : wire_formats()) {
    CompressionSpec spec = CompressionSpec::parse(wire->name);
    all.push_back(spec.to_string());
    if (!wire->stochastic || spec.rounding == Rounding::stochastic) continue;
    spec.rounding = Rounding::stochastic;
    all.push_back(spec.to_string());
  }
  return all;
}

// Returns the practical choices, `--compression shelf`: every format with default options, and the options
// that change the trade-off.
inline std::vector<std::string> shelf_specs() {
  std::vector<std::string> all;
  for (Wire wire : wire_formats()) all.emplace_back(wire->name);
  for (const char* spec : {"int4:rotate=hadamard", "eden:bits=2", "eden:bits=1", "topk:k=41",
                           "topk:k=41,values=int2", "powersgd:rank=1", "powersgd:rank=4", "powersgd:rank=16",
                           "powersgd:rank=4,alternate=on", "randk:ratio=0.1", "randk:ratio=0.01"})
    all.emplace_back(spec);
  return all;
}

}  // namespace gradwire
