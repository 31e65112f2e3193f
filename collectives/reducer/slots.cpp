// Slots: memory for the gradients of some of the buckets. A bucket reuses an earlier bucket's slot once this
// rank's part of the earlier bucket's mean has been copied to shard_.
#include <algorithm>

#include "collectives/reducer/reducer.h"

namespace gradwire {

size_t Reducer::slots() const {
  return std::min(static_cast<size_t>(options_.slots), layout_.buckets.size());
}

int64_t Reducer::largest_bucket() const {
  int64_t most = 0;
  for (const BucketRange& bucket : layout_.buckets) most = std::max(most, bucket.elements());
  return most;
}

float* Reducer::memory_of(size_t bucket) const {
  if (!gradients_) return nullptr;
  float* all = gradients_.as<float>();
  if (gradient_elements() == layout_.elements) return all + layout_.buckets[bucket].begin;
  return all + static_cast<int64_t>(bucket % slots()) * largest_bucket();
}

int64_t Reducer::gradient_elements() const {
  if (!in_turns()) return layout_.elements;
  return std::min(layout_.elements, static_cast<int64_t>(slots()) * largest_bucket());
}

void Reducer::build_slots() {
  int64_t packed = 0;
  for (Bucket& bucket : buckets_) {
    bucket.packed = packed;
    packed += bucket.owned.count();
  }
  shard_ = make_buffer<float>(comm_.device(), packed);
  fill_zero(stream_, shard_.data(), shard_.bytes());
  for (size_t s = 0; s < slots(); ++s) taken_.push_back(Event::create(comm_.device()));
}

// Copies the mean of this rank's part to shard_ and frees the slot.
void Reducer::take(const Bucket& bucket, Event& taken) {
  const Stream& stream = lane_of(bucket).stream;
  copy(stream, shard_.as<float>() + bucket.packed, bucket.data + bucket.owned.begin,
       static_cast<size_t>(bucket.owned.count()) * sizeof(float));
  taken.record(stream);
}

}  // namespace gradwire
