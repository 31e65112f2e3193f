// Adopted gradients, which are in the caller's memory. They are reduced in place, or copied into and out of
// the reducer's memory.
#include "collectives/reducer/reducer.h"

#include <fmt/format.h>

#include <algorithm>

#include "kernels/wire/fp16.h"
#include "runtime/util/error.h"

namespace gradwire {

void Reducer::adopt(std::span<void* const> gradients) {
  std::lock_guard lock(mutex_);
  if (gradients.size() != tensors_.size()) {
    throw BadInput(
        fmt::format("Reducer::adopt: {} addresses for {} tensors", gradients.size(), tensors_.size()));
  }
  for (size_t i = 0; i < tensors_.size(); ++i) {
    const std::string& name = tensors_[i].name;
    if (ready_[i]) {
      throw BadInput(
          fmt::format("Reducer::adopt in the middle of a step: '{}' is ready; call wait() first", name));
    }
    if (gradients[i] == nullptr && tensors_[i].count() > 0) {
      throw BadInput(fmt::format("Reducer::adopt: the address of gradient '{}' is null", name));
    }
  }
  adopted_.assign(gradients.begin(), gradients.end());
  for (Bucket& b : buckets_) {
    float* data = common_base(b);
    b.staged = data == nullptr && b.elements() > 0;
    if (b.staged) data = staging_of(b);
    if (data == b.data) continue;
    lane_of(b).stream.synchronize();
    b.codec->rebind(data);
    b.data = data;
  }
}

int Reducer::buckets_in_place() const {
  return static_cast<int>(std::count_if(buckets_.begin(), buckets_.end(), [](auto& b) { return !b.staged; }));
}

float* Reducer::gradient(int i) const {
  if (!adopted_.empty()) return static_cast<float*>(adopted_.at(static_cast<size_t>(i)));
  return gradients_ ? gradients_.as<float>() + offset(i) : nullptr;
}

// Returns the bucket's address in the reducer's memory. The buckets of a lane share one buffer, which is as
// large as the largest bucket.
float* Reducer::staging_of(const Bucket& bucket) {
  if (gradients_) return gradients_.as<float>() + bucket.begin;
  Lane& lane = lane_of(bucket);
  if (!lane.staging) {
    int64_t most = 0;
    for (const Bucket& b : buckets_) {
      if (b.lane == bucket.lane) most = std::max(most, b.elements());
    }
    lane.staging = comm_.transport().exchange_memory(static_cast<size_t>(most) * sizeof(float));
  }
  return lane.staging.as<float>();
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

void Reducer::clear_gaps(const Bucket& bucket) const {
  for (const ElementRange& gap : bucket.gaps) {
    fill_zero(lane_of(bucket).stream, bucket.data + gap.begin,
              static_cast<size_t>(gap.count()) * sizeof(float));
  }
}

void Reducer::stage(const Bucket& bucket, bool in) {
  const Stream& stream = lane_of(bucket).stream;
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
