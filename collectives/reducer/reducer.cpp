#include "collectives/reducer/reducer.h"

#include <algorithm>
#include <array>
#include <deque>
#include <mutex>
#include <optional>

#include "runtime/error.h"

namespace gradwire {
namespace {

int64_t element_count(const GradientTensor& tensor) {
  int64_t count = 1;
  for (int64_t extent : tensor.shape) {
    if (extent < 0) throw BadInput("gradient '" + tensor.name + "' has a negative extent");
    count *= extent;
  }
  return count;
}

// Marks and counters of one step.
struct StepMarks {
  int64_t step = -1;                 // whose they are
  std::deque<BucketPhases> buckets;  // they stay where they are
  Event wait_begin, wait_end;
  // Written on the reducer's stream, read after wait_end.
  std::shared_ptr<std::array<uint64_t, 2>> bytes_sent = std::make_shared<std::array<uint64_t, 2>>();
};

struct Bucket {
  int first_tensor = 0, last_tensor = 0;  // [first, last)
  int64_t begin = 0, end = 0;             // elements of the flat buffer
  std::unique_ptr<Codec> codec;

  // Of the step under way.
  int ready = 0;
  std::vector<Stream> producers;

  float* data = nullptr;  // what the codec works on: a part of the flat buffer, or memory adopted as it is
  bool staged = false;    // tensors are copied in and out of the flat buffer
  size_t lane = 0;
};

// Where buckets are worked on one after the other.
struct Lane {
  Stream stream = {};
  size_t workspace_bytes = 0;
  Buffer workspace = {};
  Event joined = {};  // the end of the step, for the first lane
};

}  // namespace

class Reducer::Impl {
 public:
  Impl(Communicator& comm, const CompressionSpec& spec, std::vector<GradientTensor> tensors,
       ReducerOptions options)
      : comm_(comm), spec_(spec), tensors_(std::move(tensors)), options_(options) {
    if (options_.alignment < 1) throw BadInput("ReducerOptions::alignment must be at least 1 element");
    for (const GradientTensor& t : tensors_) {
      offsets_.push_back(elements_);
      elements_ += (element_count(t) + options_.alignment - 1) / options_.alignment * options_.alignment;
    }
    if (options_.own_gradients) gradients_ = make_buffer<float>(comm.device(), elements_);
    ready_.assign(tensors_.size(), false);
    if (options_.stream) {
      stream_ = options_.stream;
    } else if (comm.world() > 1) {
      stream_ = Stream::create(comm.device(), "communicate");
    } else {
      stream_ = comm.device().is_host() ? Stream::immediate_host() : Stream::create(comm.device(), "set-up");
    }
    fill_zero(stream_, gradients_.data(), gradients_.bytes());
    if (comm.world() > 1) build_buckets();
    stream_.synchronize();
  }

  ~Impl() {
    // Whatever is in flight uses memory that dies with this object. A stream that failed has left the other's
    // work behind.
    std::vector<Stream> busy = {stream_};
    for (const Lane& lane : lanes_) busy.push_back(lane.stream);
    if (!buckets_.empty()) busy.push_back(comm_.transfers());
    for (const Stream& stream : busy) {
      try {
        stream.synchronize();
      } catch (...) {
      }
    }
  }

  void adopt(std::span<float* const> gradients) {
    std::lock_guard lock(mutex_);
    if (gradients.size() != tensors_.size()) {
      throw BadInput("Reducer::adopt: " + std::to_string(gradients.size()) + " addresses for " +
                     std::to_string(tensors_.size()) + " tensors");
    }
    for (size_t i = 0; i < tensors_.size(); ++i) {
      if (ready_[i])
        throw BadInput("Reducer::adopt in the middle of a step: '" + tensors_[i].name + "' is ready");
      if (gradients[i] == nullptr && element_count(tensors_[i]) > 0) {
        throw BadInput("Reducer::adopt: the address of gradient '" + tensors_[i].name + "' is null");
      }
    }
    adopted_.assign(gradients.begin(), gradients.end());
    for (Bucket& b : buckets_) {
      float* data = common_base(b);
      b.staged = (data == nullptr || !options_.in_place) && b.end > b.begin;
      if (b.staged) {
        if (!gradients_) {
          gradients_ = make_buffer<float>(comm_.device(), elements_);
          fill_zero(stream_, gradients_.data(), gradients_.bytes());
        }
        data = gradients_.as<float>() + b.begin;
      }
      if (data == b.data) continue;
      lane_of(b).stream.synchronize();
      b.codec->rebind(data);
      b.data = data;
    }
  }

  void ready(int i, const Stream& producer) {
    std::lock_guard lock(mutex_);
    if (i < 0 || i >= static_cast<int>(tensors_.size())) {
      throw BadInput("Reducer::ready: tensor " + std::to_string(i) + " of " +
                     std::to_string(tensors_.size()));
    }
    if (ready_[i]) throw BadInput("gradient '" + tensors_[i].name + "' was marked ready twice in one step");
    if (!options_.own_gradients && adopted_.empty()) {
      throw BadInput("Reducer::ready: no gradients; they come from adopt() when own_gradients is off");
    }
    ready_[i] = true;
    if (buckets_.empty()) return;
    Bucket& bucket = buckets_[bucket_of_[i]];
    ++bucket.ready;
    if (std::find(bucket.producers.begin(), bucket.producers.end(), producer) == bucket.producers.end()) {
      bucket.producers.push_back(producer);
    }
    // In order, whatever the order of readiness: all ranks must issue the same collectives in the same order.
    while (launched_ < static_cast<int>(buckets_.size()) && is_full(buckets_[launched_])) launch(launched_++);
  }

  void wait(const Stream& consumer) {
    std::lock_guard lock(mutex_);
    std::string missing;
    for (size_t i = 0; i < ready_.size(); ++i) {
      if (!ready_[i]) missing += (missing.empty() ? "'" : ", '") + tensors_[i].name + "'";
    }
    if (!missing.empty()) throw BadInput("Reducer::wait before these gradients were ready: " + missing);
    ready_.assign(ready_.size(), false);
    if (!buckets_.empty()) {
      StepMarks& marks = marks_[step_ % kStatsKept];
      marks.step = step_;
      for (Lane& lane : lanes_) {
        if (lane.stream == stream_) continue;
        lane.joined.record(lane.stream);
        stream_.wait(lane.joined);
      }
      increment(stream_, device_step_.as<uint64_t>());
      note_bytes(marks, 1);
      done_.record(stream_);
      if (options_.timing) marks.wait_begin.record(consumer);
      consumer.wait(done_);
      if (options_.timing) marks.wait_end.record(consumer);
      for (Bucket& b : buckets_) {
        b.ready = 0;
        b.producers.clear();
      }
      launched_ = 0;
    }
    ++step_;
  }

  int64_t steady_from() const {
    int64_t step = 0;
    for (const Bucket& b : buckets_) step = std::max(step, b.codec->steady_from());
    return step;
  }

  void replayed(int64_t captured) {
    std::lock_guard lock(mutex_);
    if (captured < first_step_ || captured >= step_ || captured < steady_from()) {
      throw BadInput("Reducer::replayed: step " + std::to_string(captured) +
                     " cannot have been captured: steps are steady from " + std::to_string(steady_from()) +
                     ", and the next is " + std::to_string(step_));
    }
    marks_[captured % kStatsKept].step = step_;
    ++step_;
  }

  void resume_at(int64_t steps) {
    std::lock_guard lock(mutex_);
    if (steps < 0) throw BadInput("Reducer::resume_at: " + std::to_string(steps) + " steps");
    step_ = first_step_ = steps;
    if (buckets_.empty()) return;
    uint64_t value = static_cast<uint64_t>(steps);
    store(stream_, device_step_.data(), &value, sizeof value);
    stream_.synchronize();
  }

  ReducerStats stats(int64_t step) const {
    ReducerStats stats;
    if (buckets_.empty()) return stats;
    const StepMarks& marks = marks_of(step);
    stats.wire_bytes = (*marks.bytes_sent)[1] - (*marks.bytes_sent)[0];
    stats.dense_bytes = dense_bytes_;
    if (options_.timing) {
      double until = 0;  // of those before, from the beginning of the first
      for (const BucketPhases& b : marks.buckets) {
        const auto [begin, end] = b.since(marks.buckets[0]);
        stats.comm_ms += std::max(0.0, end - std::max(begin, until));
        until = std::max(until, end);
        stats.compress_ms += b.ms(Phase::compress);
        stats.communicate_ms += b.ms(Phase::communicate);
        stats.decompress_ms += b.ms(Phase::decompress);
      }
      stats.exposed_comm_ms = elapsed_ms(marks.wait_begin, marks.wait_end);
    }
    return stats;
  }

  void trace(int64_t step, Tracer& tracer) const {
    if (buckets_.empty() || !options_.timing) return;
    const StepMarks& marks = marks_of(step);
    for (size_t b = 0; b < buckets_.size(); ++b) {
      marks.buckets[b].trace(tracer, lane_of(buckets_[b]).stream.name(), step,
                             {{"bucket", static_cast<int64_t>(b)},
                              {"spec", spec_.to_string()},
                              {"bucket_bytes", (buckets_[b].end - buckets_[b].begin) * 4}});
    }
    tracer.collect(step);
  }

  std::vector<CodecState> state() const {
    std::vector<CodecState> all;
    for (size_t b = 0; b < buckets_.size(); ++b) {
      for (CodecState s : buckets_[b].codec->state()) {
        s.name = "bucket" + std::to_string(b) + "/" + s.name;
        all.push_back(s);
      }
    }
    return all;
  }

  std::string describe() const {
    if (buckets_.empty()) return "world of 1: gradients are used as they are\n";
    std::string text;
    for (size_t b = 0; b < buckets_.size(); ++b) {
      const Bucket& bucket = buckets_[b];
      text += "bucket " + std::to_string(b) + ": " +
              std::to_string(bucket.last_tensor - bucket.first_tensor) + " tensors, " +
              std::to_string((bucket.end - bucket.begin) * 4) + " bytes; " + bucket.codec->describe() + "; " +
              plan_text(bucket) + "\n";
    }
    if (const std::string links = links_text(); !links.empty()) text += links + "\n";
    return text;
  }

  std::string schedule() const {
    std::vector<std::string> kinds;
    for (const Bucket& b : buckets_) {
      for (const PlannedAllreduce& p : b.codec->plan()) {
        if (std::find(kinds.begin(), kinds.end(), name(p.schedule)) == kinds.end())
          kinds.push_back(name(p.schedule));
      }
    }
    std::string all;
    for (const std::string& kind : kinds) all += (all.empty() ? "" : "+") + kind;
    return all.empty() ? "none" : all;
  }

  std::string schedule_reason() const {
    if (buckets_.empty()) return "a world of 1";
    auto smaller = [](const Bucket& a, const Bucket& b) { return a.end - a.begin < b.end - b.begin; };
    std::string text = plan_text(*std::max_element(buckets_.begin(), buckets_.end(), smaller));
    if (const std::string links = links_text(); !links.empty()) text += "; " + links;
    return text;
  }

  ReducerMemory memory() const {
    ReducerMemory memory;
    for (const Lane& lane : lanes_) memory.staging += static_cast<int64_t>(lane.workspace.bytes());
    for (const Bucket& b : buckets_) {
      int64_t residual = 0;
      for (const CodecState& s : b.codec->state()) {
        if (s.first_element >= 0) residual += s.count * static_cast<int64_t>(sizeof(float));
      }
      memory.residual += residual;
      memory.factors += b.codec->state_bytes() - residual;
    }
    return memory;
  }

  int buckets_in_place() const {
    return static_cast<int>(
        std::count_if(buckets_.begin(), buckets_.end(), [](auto& b) { return !b.staged; }));
  }
  float* gradient(int i) const {
    return adopted_.empty() ? gradients_.as<float>() + offset(i) : adopted_.at(i);
  }
  const GradientTensor& tensor(int i) const { return tensors_.at(i); }
  int64_t offset(int i) const { return offsets_.at(i); }
  int tensors() const { return static_cast<int>(tensors_.size()); }
  int64_t elements() const { return elements_; }
  const Buffer& gradients() const { return gradients_; }
  int64_t steps() const { return step_; }
  int buckets() const { return static_cast<int>(buckets_.size()); }

 private:
  const StepMarks& marks_of(int64_t step) const {
    // A graph's marks lie where those of the step lie in which it was captured.
    auto found =
        std::find_if(marks_.begin(), marks_.end(), [&](const StepMarks& m) { return m.step == step; });
    if (step < first_step_ || step >= step_ || found == marks_.end()) {
      throw BadInput("Reducer::stats: step " + std::to_string(step) + " is not one of the last " +
                     std::to_string(kStatsKept) + " of " + std::to_string(step_));
    }
    return *found;
  }
  // What a choice was made from; empty when none was to be made.
  std::string links_text() const {
    if (spec_.schedule != ScheduleKind::automatic || comm_.world() <= 2) return "";
    const LinkCosts& costs = planner_->costs();
    return (costs.measured ? "links measured: " : "links not measured, assumed: ") + costs.to_string();
  }
  // "schedule two_shot (fastest: 1.2 ms predicted, ring 1.9 ms)", for each allreduce.
  static std::string plan_text(const Bucket& bucket) {
    std::string text;
    for (const PlannedAllreduce& p : bucket.codec->plan()) {
      text += (text.empty() ? "" : "; ") + p.what + (p.what.empty() ? "" : ": ") + "schedule " +
              name(p.schedule) + " (" + p.reason + ")";
    }
    return text;
  }
  Lane& lane_of(const Bucket& b) { return lanes_[b.lane]; }
  const Lane& lane_of(const Bucket& b) const { return lanes_[b.lane]; }
  static bool is_full(const Bucket& b) { return b.ready == b.last_tensor - b.first_tensor; }

  void build_buckets() {
    cut_into_buckets();
    // A second bucket can be encoded while the links carry the first, unless somebody else gives the order.
    lanes_.push_back({.stream = stream_});
    if (buckets_.size() > 1 && !options_.stream) {
      lanes_.push_back({.stream = Stream::create(comm_.device(), "communicate 2"),
                        .joined = Event::create(comm_.device())});
      begun_ = Event::create(comm_.device());
    }
    device_step_ = make_buffer<uint64_t>(comm_.device(), 1);
    fill_zero(stream_, device_step_.data(), device_step_.bytes());
    done_ = Event::create(comm_.device());
    full_ = Event::create(comm_.device());
    const bool choice = spec_.schedule == ScheduleKind::automatic && comm_.world() > 2;
    const bool measure = choice || options_.slice_bytes == kAutomaticSlices;
    planner_.emplace(spec_, comm_.world(), comm_.ranks_per_node(),
                     measure ? comm_.link_costs(stream_) : LinkCosts{}, options_.slice_bytes);
    for (size_t b = 0; b < buckets_.size(); ++b) {
      Bucket& bucket = buckets_[b];
      BucketContext context;
      context.planner = &*planner_;
      const int64_t elements = bucket.end - bucket.begin;
      dense_bytes_ +=
          4 * elements_sent(planner_->choose(elements, Wire::fp32).schedule, comm_.rank(), elements);
      context.transport = &comm_.transport();
      context.spec = spec_;
      context.stream = stream_;
      context.transfers = comm_.transfers();
      context.slice_bytes = options_.slice_bytes;
      context.beside_others = lanes_.size() > 1;
      for (int i = bucket.first_tensor; i < bucket.last_tensor; ++i) {
        const GradientTensor& t = tensors_[i];
        int64_t count = element_count(t), rows = t.shape.empty() ? 1 : t.shape[0];
        if (t.shape.size() < 2 || count == 0) rows = count;
        context.tensors.push_back(
            {t.name, rows, rows == 0 ? 0 : count / rows, offsets_[i] - bucket.begin, i});
      }
      bucket.data = gradients_ ? gradients_.as<float>() + bucket.begin : nullptr;
      context.gradients = bucket.data;
      context.elements = bucket.end - bucket.begin;
      context.first_element = bucket.begin;
      context.scale = options_.average ? 1.0f / static_cast<float>(comm_.world()) : 1.0f;
      context.rounding_seed = options_.seed * 0x9e3779b97f4a7c15ull + static_cast<uint64_t>(comm_.rank()) + 1;
      context.step = device_step_.as<const uint64_t>();
      context.name = "bucket " + std::to_string(b + 1) + " of " + std::to_string(buckets_.size()) +
                     (options_.name.empty() ? "" : " of " + options_.name);
      bucket.codec = make_codec(context);
      bucket.lane = b % lanes_.size();
      size_t& most = lane_of(bucket).workspace_bytes;
      most = std::max(most, bucket.codec->workspace_bytes());
    }
    for (Lane& lane : lanes_) lane.workspace = Buffer(comm_.device(), lane.workspace_bytes);
    for (Bucket& b : buckets_) b.codec->bind(lane_of(b).workspace.data());
    for (StepMarks& marks : marks_) {
      marks.wait_begin = Event::create_timer(comm_.device());
      marks.wait_end = Event::create_timer(comm_.device());
      for (size_t b = 0; b < buckets_.size(); ++b) {
        marks.buckets.emplace_back(BucketPhases::Options{
            .bucket = static_cast<int>(b), .timing = options_.timing, .tracer = options_.tracer});
      }
    }
  }

  // A bucket is closed by the tensor that fills it to bucket_bytes; tensors are never split.
  void cut_into_buckets() {
    bucket_of_.resize(tensors_.size());
    for (int i = 0; i < static_cast<int>(tensors_.size()); ++i) {
      int64_t end = i + 1 < static_cast<int>(tensors_.size()) ? offsets_[i + 1] : elements_;
      bool open =
          !buckets_.empty() && (buckets_.back().end - buckets_.back().begin) * 4 < options_.bucket_bytes;
      if (!open) {
        Bucket& bucket = buckets_.emplace_back();
        bucket.first_tensor = i;
        bucket.begin = offsets_[i];
      }
      buckets_.back().last_tensor = i + 1;
      buckets_.back().end = end;
      bucket_of_[i] = static_cast<int>(buckets_.size()) - 1;
    }
  }

  void launch(int b) {
    Bucket& bucket = buckets_[b];
    StepMarks& marks = marks_[step_ % kStatsKept];
    const Stream& stream = lane_of(bucket).stream;
    for (const Stream& producer : bucket.producers) {
      full_.record(producer);
#ifndef GRADWIRE_PLANT_MISSING_WAIT  // tests/tsan proves that ThreadSanitizer sees this gone
      stream.wait(full_);
#endif
    }
    if (b == 0) {
      note_bytes(marks, 0);
      if (begun_) begun_.record(stream_);
    } else if (b < static_cast<int>(lanes_.size())) {
      stream.wait(begun_);  // behind all of the step before, whose end only the first lane has seen
    }
    BucketPhases& phases = marks.buckets[b];
    phases.begin(stream);
    if (bucket.staged) {
      phases.enter(stream, Phase::compress);
      stage(bucket, true);
    }
    bucket.codec->run(stream, step_, phases);
    if (bucket.staged) {
      phases.enter(stream, Phase::decompress);
      stage(bucket, false);
    }
    phases.end();
  }

  // Where the bucket begins if the adopted gradients lie as in the flat buffer; null if they don't.
  float* common_base(const Bucket& bucket) const {
    uintptr_t base = 0;
    for (int i = bucket.first_tensor; i < bucket.last_tensor; ++i) {
      if (element_count(tensors_[i]) == 0) continue;
      // As integers: addresses of different allocations may not be subtracted as pointers.
      uintptr_t start = reinterpret_cast<uintptr_t>(adopted_[i]) - 4 * (offsets_[i] - bucket.begin);
      if (base == 0) base = start;
      if (start != base) return nullptr;
    }
    // The gap behind the last tensor is not the caller's to write into.
    const int last = bucket.last_tensor - 1;
    if (offsets_[last] + element_count(tensors_[last]) != bucket.end) return nullptr;
    return reinterpret_cast<float*>(base);
  }

  void stage(const Bucket& bucket, bool in) {
    const Stream& stream = lane_of(bucket).stream;
    for (int i = bucket.first_tensor; i < bucket.last_tensor; ++i) {
      float* flat = gradients_.as<float>() + offsets_[i];
      size_t bytes = static_cast<size_t>(element_count(tensors_[i])) * sizeof(float);
      copy(stream, in ? flat : adopted_[i], in ? adopted_[i] : flat, bytes);
    }
  }

  void note_bytes(StepMarks& marks, int which) {
    auto note = [this, bytes = marks.bytes_sent, which] { (*bytes)[which] = comm_.bytes_sent(); };
    if (stream_.device().is_host()) {
      stream_.submit(note);
    } else {
      note();  // CUDA transports count when they enqueue
    }
  }

  Communicator& comm_;
  const CompressionSpec spec_;
  const std::vector<GradientTensor> tensors_;
  const ReducerOptions options_;
  std::vector<int64_t> offsets_;
  int64_t elements_ = 0;
  Buffer gradients_, device_step_;
  std::vector<float*> adopted_;  // by tensor; empty: the gradients are in gradients_
  std::vector<Bucket> buckets_;  // empty in a world of 1
  std::vector<int> bucket_of_;   // tensor -> bucket
  std::optional<SchedulePlanner> planner_;
  uint64_t dense_bytes_ = 0;
  std::array<StepMarks, kStatsKept> marks_;
  Event full_, begun_, done_;

  std::mutex mutex_;  // ready() may come from several threads
  std::vector<bool> ready_;
  int launched_ = 0;  // buckets of the step under way whose work is enqueued
  int64_t step_ = 0, first_step_ = 0;
  // Last: destroyed first, before anything their tasks use.
  std::vector<Lane> lanes_;  // buckets take turns; the first is on stream_
  Stream stream_;
};

Reducer::Reducer(Communicator& comm, const CompressionSpec& spec, std::vector<GradientTensor> tensors,
                 ReducerOptions options)
    : impl_(std::make_unique<Impl>(comm, spec, std::move(tensors), options)) {}
Reducer::~Reducer() = default;

int Reducer::tensors() const {
  return impl_->tensors();
}
float* Reducer::gradient(int i) const {
  return impl_->gradient(i);
}
const Buffer& Reducer::gradients() const {
  return impl_->gradients();
}
int64_t Reducer::offset(int i) const {
  return impl_->offset(i);
}
int64_t Reducer::elements() const {
  return impl_->elements();
}
void Reducer::adopt(std::span<float* const> gradients) {
  impl_->adopt(gradients);
}
int Reducer::buckets_in_place() const {
  return impl_->buckets_in_place();
}
void Reducer::ready(int i, const Stream& producer) {
  impl_->ready(i, producer);
}
void Reducer::wait(const Stream& consumer) {
  impl_->wait(consumer);
}
void Reducer::resume_at(int64_t steps) {
  impl_->resume_at(steps);
}
int64_t Reducer::steady_from() const {
  return impl_->steady_from();
}
void Reducer::replayed(int64_t captured) {
  impl_->replayed(captured);
}
int64_t Reducer::steps() const {
  return impl_->steps();
}
ReducerStats Reducer::stats(int64_t step) const {
  return impl_->stats(step);
}
void Reducer::trace(int64_t step, Tracer& tracer) const {
  impl_->trace(step, tracer);
}
std::vector<CodecState> Reducer::state() const {
  return impl_->state();
}
int Reducer::buckets() const {
  return impl_->buckets();
}
std::string Reducer::schedule() const {
  return impl_->schedule();
}
std::string Reducer::schedule_reason() const {
  return impl_->schedule_reason();
}
ReducerMemory Reducer::memory() const {
  return impl_->memory();
}
std::string Reducer::describe() const {
  return impl_->describe();
}

}  // namespace gradwire
