// The work of a step: gradients become ready, full buckets are launched in order, and the consumer waits for
// the last bucket.
#include "collectives/reducer/reducer.h"

#include <algorithm>
#include <numeric>

#include "runtime/util/error.h"

namespace gradwire {

void Reducer::ready(int i, const Stream& producer) {
  std::lock_guard lock(mutex_);
  if (i < 0 || i >= static_cast<int>(tensors_.size())) {
    throw BadInput("Reducer::ready: tensor {} of {}", i, tensors_.size());
  }
  if (ready_[i]) {
    throw BadInput("gradient '{}' was marked ready twice in one step", tensors_[i].name);
  }
  if (!options_.own_gradients && adopted_.empty()) {
    throw BadInput("Reducer::ready: no gradients; call adopt() first, because own_gradients is off");
  }
  ready_[i] = true;
  if (buckets_.empty()) return;
  Bucket& bucket = buckets_[bucket_of_[i]];
  ++bucket.ready;
  if (std::find(bucket.producers.begin(), bucket.producers.end(), producer) == bucket.producers.end()) {
    bucket.producers.push_back(producer);
  }
  // Launch in a fixed order, independent of the order of readiness, because all ranks must issue collectives
  // in the same order.
  while (launched_ < static_cast<int>(order_.size())) {
    const Bucket& next = buckets_[order_[launched_]];
    if (next.ready < next.tensors()) break;
    launch(launched_++);
  }
}

void Reducer::launch_in(std::vector<int> order) {
  std::lock_guard lock(mutex_);
  const bool idle = launched_ == static_cast<int>(order_.size()) || std::ranges::count(ready_, true) == 0;
  std::vector<int> sorted = order;
  std::sort(sorted.begin(), sorted.end());
  std::vector<int> all(buckets_.size());
  std::iota(all.begin(), all.end(), 0);
  if (!idle || sorted != all) {
    throw BadInput("Reducer::launch_in: {}",
                   !idle ? "only between steps, or when every gradient of a step is ready"
                         : fmt::format("not a permutation of {} buckets", all.size()));
  }
  order_ = std::move(order);
  if (launched_ > 0) launched_ = static_cast<int>(order_.size());
}

void Reducer::check_ready() const {
  std::string missing;
  for (size_t i = 0; i < ready_.size(); ++i) {
    if (!ready_[i]) missing += fmt::format("{}'{}'", missing.empty() ? "" : ", ", tensors_[i].name);
  }
  if (!missing.empty()) throw BadInput("Reducer::wait before these gradients were ready: " + missing);
}

void Reducer::wait_for(int bucket, const Stream& consumer) {
  std::lock_guard lock(mutex_);
  if (!options_.single_waits) throw BadInput("Reducer::wait_for needs the option single_waits");
  check_ready();
  if (!buckets_.empty()) consumer.wait(buckets_.at(static_cast<size_t>(bucket)).reduced);
}

void Reducer::wait(const Stream& consumer) {
  // A gradient that is not ready is unused: it becomes zero.
  for (int i = 0; options_.skip_unused && i < tensors(); ++i) {
    {
      std::lock_guard lock(mutex_);
      if (ready_[i]) continue;
    }
    const GradientTensor& tensor = tensors_[i];
    if (tensor.count() > 0) {
      fill_zero(consumer, gradient(i), static_cast<size_t>(tensor.count() * bytes_of(tensor.dtype)));
    }
    ready(i, consumer);
  }
  std::lock_guard lock(mutex_);
  check_ready();
  ready_.assign(ready_.size(), false);
  if (!buckets_.empty()) {
    StepMarks& marks = marks_[step_ % kStatsKept];
    marks.step = step_;
    for (Lane& lane : lanes_) {
      lane.behind = true;
      if (lane.stream == stream_) continue;
      lane.joined.record(lane.stream);
      stream_.wait(lane.joined);
    }
    increment(stream_, device_step_.as<uint64_t>());
    count_bytes(marks, 1);
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

int64_t Reducer::steady_from() const {
  int64_t step = 0;
  for (const Bucket& b : buckets_) step = std::max(step, b.pipeline->steady_from());
  return step;
}

int64_t Reducer::period() const {
  int64_t steps = 1;
  for (const Bucket& b : buckets_) steps = std::lcm(steps, b.pipeline->period());
  return steps;
}

void Reducer::replayed(int64_t captured) {
  std::lock_guard lock(mutex_);
  if (captured < first_step_ || captured >= step_ || captured < steady_from()) {
    throw BadInput(
        "Reducer::replayed: step {} cannot have been captured: steps are steady from {}, and the next is {}",
        captured, steady_from(), step_);
  }
  if ((step_ - captured) % period() != 0) {
    throw BadInput("Reducer::replayed: step {} cannot replace step {}: steps repeat every {} steps", captured,
                   step_, period());
  }
  marks_[captured % kStatsKept].step = step_;
  ++step_;
}

void Reducer::resume_at(int64_t steps) {
  std::lock_guard lock(mutex_);
  if (steps < 0) throw BadInput("Reducer::resume_at: {} steps", steps);
  step_ = first_step_ = steps;
  if (buckets_.empty()) return;
  uint64_t value = static_cast<uint64_t>(steps);
  store(stream_, device_step_.data(), &value, sizeof value);
  stream_.synchronize();
}

void Reducer::launch(int position) {
  const int b = order_[static_cast<size_t>(position)];
  Bucket& bucket = buckets_[b];
  StepMarks& marks = marks_[step_ % kStatsKept];
  const Stream& stream = lanes_[bucket.lane].stream;
  for (const Stream& producer : bucket.producers) {
    full_.record(producer);
#ifndef GRADWIRE_PLANT_MISSING_WAIT  // tests/tsan proves that ThreadSanitizer detects its absence
    stream.wait(full_);
#endif
  }
  if (position == 0) {
    marks.first = static_cast<size_t>(b);
    count_bytes(marks, 0);
    if (begun_) begun_.record(stream_);
  }
  Lane& lane = lanes_[bucket.lane];
  if (lane.behind && begun_ && stream != stream_) {
    stream.wait(begun_);  // only the first lane has waited for the end of the previous step
  }
  lane.behind = false;
  BucketPhases& phases = marks.buckets[b];
  phases.begin(stream);
  if (bucket.staged) {
    phases.enter(stream, Phase::compress);
    stage(bucket, true);
    for (const ElementRange& gap : bucket.gaps) {
      fill_zero(stream, bucket.data + gap.begin, static_cast<size_t>(gap.count()) * sizeof(float));
    }
  }
  bucket.pipeline->run(stream, step_, phases);
  if (bucket.staged) {
    phases.enter(stream, Phase::decompress);
    stage(bucket, false);
  }
  phases.end();
  if (options_.single_waits) bucket.reduced.record(stream);
}

void Reducer::count_bytes(StepMarks& marks, int which) {
  auto count = [this, bytes = marks.bytes_sent, which] { (*bytes)[which] = comm_.bytes_sent(); };
  if (stream_.device().is_host()) {
    stream_.submit(count);
  } else {
    count();  // CUDA transports count bytes when work is enqueued
  }
}

}  // namespace gradwire
