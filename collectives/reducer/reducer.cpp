// Constructs a reducer: its streams, and a pipeline for each bucket.
#include "collectives/reducer/reducer.h"

#include <algorithm>
#include <numeric>

#include "kernels/wire/floats.h"
#include "runtime/util/error.h"

namespace gradwire {

Reducer::Reducer(Communicator& comm, const CompressionSpec& spec, std::vector<GradientTensor> tensors,
                 ReducerOptions options)
    : comm_(comm),
      spec_(spec),
      tensors_(std::move(tensors)),
      options_(std::move(options)),
      layout_(lay_out(tensors_, options_.alignment, options_.bucket_bytes)) {
  for (const GradientTensor& tensor : tensors_) {
    const bool half = tensor.dtype == DType::bf16 || tensor.dtype == DType::f16;
    if (tensor.dtype == DType::f32 || (half && !options_.own_gradients)) continue;
    throw Error("Reducer: gradients of {}, of '{}', must be F32, or BF16 or F16 if they are adopted",
                gradwire::name(tensor.dtype), tensor.name);
  }
  ready_.assign(tensors_.size(), false);
  // Dion computes a step from the mean gradient, even if that is the rank's own.
  const bool works = comm.world() > 1 || spec_.method == CompressionSpec::Method::dion;
  if (options_.stream) {
    stream_ = options_.stream;
  } else if (works) {
    stream_ = Stream::create(comm.device(), "communicate", Stream::Priority::high);
  } else {
    stream_ = comm.device().is_host() ? Stream::immediate_host() : Stream::create(comm.device(), "set-up");
  }
  if (options_.own_gradients) {
    gradients_ = Buffer(comm.device(), static_cast<size_t>(layout_.elements) * sizeof(float));
    fill_zero(stream_, gradients_.data(), gradients_.bytes());
  }
  if (works) {
    // With a second lane, a bucket is encoded while another bucket is in transfer. A caller's stream gets
    // only one lane, because the order of work must not change.
    lanes_.push_back({.stream = stream_});
    if (layout_.buckets.size() > 1 && !options_.stream) {
      lanes_.push_back({.stream = Stream::create(comm_.device(), "communicate 2", Stream::Priority::high),
                        .joined = Event::create(comm_.device())});
      begun_ = Event::create(comm_.device());
    }
    done_ = Event::create(comm_.device());
    full_ = Event::create(comm_.device());
    for (StepMarks& marks : marks_) {
      marks.wait_begin = Event::create_timer(comm_.device());
      marks.wait_end = Event::create_timer(comm_.device());
      for (size_t b = 0; b < layout_.buckets.size(); ++b) {
        marks.buckets.emplace_back(static_cast<int>(b), options_.timing, options_.tracer);
      }
    }
    build_buckets();
  }
  stream_.synchronize();
}

Reducer::~Reducer() {
  // Work in flight uses this object's memory. Synchronize every stream, even after a stream has failed.
  const auto finish = [](const Stream& stream) {
    try {
      stream.synchronize();
    } catch (...) {
    }
  };
  finish(stream_);
  for (const Lane& lane : lanes_) finish(lane.stream);
  comm_.finish_transfers();
}

void Reducer::build_buckets() {
  device_step_ = make_buffer<uint64_t>(comm_.device(), 1);
  fill_zero(stream_, device_step_.data(), device_step_.bytes());
  auto plan = [&](Collective collective, std::optional<SchedulePlanner>& planner) {
    planner.emplace(spec_, collective, comm_.world(), comm_.ranks_per_node(),
                    comm_.link_costs(stream_, spec_.schedule), options_.slice_bytes);
  };
  plan(Collective::allreduce, planner_);
  if (options_.sharded) plan(Collective::reduce_scatter, scatter_planner_);
  const size_t count = layout_.buckets.size();
  for (const BucketRange& range : layout_.buckets) {
    const size_t b = buckets_.size();
    order_.push_back(static_cast<int>(b));
    Bucket& bucket = buckets_.emplace_back();
    if (options_.single_waits) bucket.reduced = Event::create(comm_.device());
    static_cast<BucketRange&>(bucket) = range;
    bucket_of_.resize(static_cast<size_t>(range.last_tensor), static_cast<int>(b));
    BucketContext context = bucket_context(
        comm_, spec_, stream_, tensors_, layout_, range, gradients_ ? gradients_.as<float>() : nullptr,
        fmt::format("bucket {} of {}{}{}", b + 1, count, options_.name.empty() ? "" : " of ", options_.name));
    context.step = device_step_.as<const uint64_t>();
    if (!options_.average) context.scale = 1.0f;
    context.rounding_seed += options_.seed * 0x9e3779b97f4a7c15ull;
    context.planner = &*planner_;
    if (options_.sharded) {
      context.shards = shards(range);
      context.scatter_planner = &*scatter_planner_;
    }
    context.transfers = comm_.transfers();
    context.slice_bytes = options_.slice_bytes;
    context.beside_others = lanes_.size() > 1;
    bucket.data = context.gradients;
    auto codec = options_.make_codec ? options_.make_codec(context) : nullptr;
    context.skip_unused = options_.skip_unused;
    bucket.pipeline = std::make_unique<BucketPipeline>(context, std::move(codec));
    bucket.lane = b % lanes_.size();
    size_t& most = lanes_[bucket.lane].workspace_bytes;
    most = std::max(most, bucket.pipeline->workspace_bytes());
    const SchedulePlanner& dense = options_.sharded ? *scatter_planner_ : *planner_;
    const int64_t sent = elements_sent(dense.choose(range.elements(), kFp32, context.shards).schedule,
                                       comm_.rank(), range.elements(), context.shards);
    int64_t bytes = 0, elements = 0;  // of the gradients, in their types
    for (int i = range.first_tensor; i < range.last_tensor; ++i) {
      bytes += tensors_[i].count() * bytes_of(tensors_[i].dtype);
      elements += tensors_[i].count();
    }
    const double per_element = elements == 0 ? 4 : static_cast<double>(bytes) / static_cast<double>(elements);
    dense_bytes_ += static_cast<uint64_t>(per_element * static_cast<double>(sent));
  }
  describe_memory();
  for (Lane& lane : lanes_) lane.workspace = Buffer(comm_.device(), lane.workspace_bytes);
  for (Bucket& b : buckets_) b.pipeline->bind(lanes_[b.lane].workspace.data());
}

void Reducer::describe_memory() {
  const std::vector<ElementRange> parts = owned();
  for (size_t b = 0; b < buckets_.size(); ++b) {
    Bucket& bucket = buckets_[b];
    bucket.owned = options_.sharded ? ElementRange{parts[b].begin - bucket.begin, parts[b].end - bucket.begin}
                                    : ElementRange{0, bucket.elements()};
    if (options_.own_gradients) continue;  // each bucket has its own memory
    for (int i = bucket.first_tensor; i < bucket.last_tensor; ++i) {
      const int64_t end = layout_.offsets[i] + tensors_[i].count();
      const int64_t next = i + 1 < bucket.last_tensor ? layout_.offsets[i + 1] : bucket.end;
      if (end < next) bucket.gaps.push_back({end - bucket.begin, next - bucket.begin});
    }
  }
}

int Reducer::bucket_of(int tensor) const {
  const auto& all = layout_.buckets;
  return static_cast<int>(std::ranges::upper_bound(all, tensor, {}, &BucketRange::last_tensor) - all.begin());
}

Shards Reducer::shards(const BucketRange& bucket) const {
  constexpr int64_t kGranularity = 8;  // in elements: 32 bytes of FP32, 16 bytes of BF16
  Shards shards;
  for (int r = 0; r < comm_.world(); ++r) {
    shards.push_back(chunk_range(bucket.elements(), comm_.world(), r, kGranularity).count());
  }
  return shards;
}

std::vector<ElementRange> Reducer::owned() const {
  if (!options_.sharded || comm_.world() == 1) return {{0, layout_.elements}};
  std::vector<ElementRange> owned;
  for (const BucketRange& bucket : layout_.buckets) {
    const Shards sizes = shards(bucket);
    const int64_t begin = std::accumulate(sizes.begin(), sizes.begin() + comm_.rank(), bucket.begin);
    owned.push_back({begin, begin + sizes[static_cast<size_t>(comm_.rank())]});
  }
  return owned;
}

// Adopted gradients, which are in the caller's memory. They are reduced in place, or copied into and out of
// the reducer's memory.

void Reducer::adopt(std::span<void* const> gradients) {
  std::lock_guard lock(mutex_);
  if (gradients.size() != tensors_.size()) {
    throw BadInput("Reducer::adopt: {} addresses for {} tensors", gradients.size(), tensors_.size());
  }
  for (size_t i = 0; i < tensors_.size(); ++i) {
    const std::string& name = tensors_[i].name;
    if (ready_[i]) {
      throw BadInput("Reducer::adopt in the middle of a step: '{}' is ready; call wait() first", name);
    }
    if (gradients[i] == nullptr && tensors_[i].count() > 0) {
      throw BadInput("Reducer::adopt: the address of gradient '{}' is null", name);
    }
  }
  adopted_.assign(gradients.begin(), gradients.end());
  for (Bucket& b : buckets_) {
    float* data = common_base(b);
    b.staged = data == nullptr && b.elements() > 0;
    if (b.staged && gradients_) {
      data = gradients_.as<float>() + b.begin;
    } else if (b.staged) {  // the buckets of a lane share one buffer, which is as large as the largest bucket
      Buffer& staging = lanes_[b.lane].staging;
      int64_t most = 0;
      for (const Bucket& other : buckets_) most = std::max(most, other.lane == b.lane ? other.elements() : 0);
      if (!staging) staging = Buffer(comm_.device(), static_cast<size_t>(most) * sizeof(float));
      data = staging.as<float>();
    }
    if (data == b.data) continue;
    lanes_[b.lane].stream.synchronize();
    b.pipeline->rebind(data);
    b.data = data;
  }
}

int Reducer::buckets_in_place() const {
  return static_cast<int>(std::ranges::count(buckets_, false, &Bucket::staged));
}

float* Reducer::gradient(int i) const {
  if (!adopted_.empty()) return static_cast<float*>(adopted_.at(static_cast<size_t>(i)));
  return gradients_ ? gradients_.as<float>() + offset(i) : nullptr;
}

// Returns the bucket's address if the adopted gradients have the flat buffer's layout; null otherwise.
float* Reducer::common_base(const Bucket& bucket) const {
  uintptr_t base = 0;
  for (int i = bucket.first_tensor; i < bucket.last_tensor; ++i) {
    if (tensors_[i].count() == 0) continue;
    if (tensors_[i].dtype != DType::f32) return nullptr;
    // Compute with integers, because subtracting pointers into different allocations is undefined.
    uintptr_t start = reinterpret_cast<uintptr_t>(adopted_[i]) - 4 * (layout_.offsets[i] - bucket.begin);
    if (base == 0) base = start;
    if (start != base) return nullptr;
  }
  // Reject a bucket with a gap after the last tensor: the gap is not part of the gradients and must not be
  // written.
  const int last = bucket.last_tensor - 1;
  if (layout_.offsets[last] + tensors_[last].count() != bucket.end) return nullptr;
  return reinterpret_cast<float*>(base);
}

void Reducer::stage(const Bucket& bucket, bool in) {
  const Stream& stream = lanes_[bucket.lane].stream;
  const ElementRange part = in ? ElementRange{0, bucket.elements()} : bucket.owned;
  for (int i = bucket.first_tensor; i < bucket.last_tensor; ++i) {
    const int64_t offset = layout_.offsets[i] - bucket.begin;
    const int64_t begin = std::max(part.begin, offset);
    const int64_t count = std::min(part.end, offset + tensors_[i].count()) - begin;
    if (count <= 0) continue;
    float* const ours = bucket.data + begin;
    void* const theirs = static_cast<char*>(adopted_[i]) + (begin - offset) * bytes_of(tensors_[i].dtype);
    if (tensors_[i].dtype == DType::f32) {
      copy(stream, in ? ours : theirs, in ? theirs : ours, static_cast<size_t>(count) * sizeof(float));
    } else if (in) {
      widen(stream, tensors_[i].dtype, theirs, ours, count);
    } else {
      narrow(stream, tensors_[i].dtype, ours, theirs, count);
    }
  }
}

}  // namespace gradwire
