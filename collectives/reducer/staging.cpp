// Gradients in the caller's memory: reduced in place, or copied into the flat buffer and out of it.
#include "collectives/reducer/reducer.h"

#include <fmt/format.h>

#include <algorithm>

#include "runtime/error.h"

namespace gradwire {

void Reducer::adopt(std::span<float* const> gradients) {
  std::lock_guard lock(mutex_);
  if (in_turns()) throw Error("Reducer::adopt: with slots, the reducer owns the gradients' memory");
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
    b.staged = (data == nullptr || !options_.in_place) && b.elements() > 0;
    if (b.staged) {
      if (!gradients_) allocate_gradients();
      data = gradients_.as<float>() + b.begin;
    }
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
  if (!adopted_.empty()) return adopted_.at(static_cast<size_t>(i));
  if (!gradients_) return nullptr;
  const auto bucket = static_cast<size_t>(bucket_of(i));
  return memory_of(bucket) + (offset(i) - layout_.buckets[bucket].begin);
}

void Reducer::allocate_gradients() {
  gradients_ = make_buffer<float>(comm_.device(), gradient_elements());
  fill_zero(stream_, gradients_.data(), gradients_.bytes());
}

// The bucket's address if the adopted gradients have the layout of the flat buffer; null if they don't.
float* Reducer::common_base(const Bucket& bucket) const {
  uintptr_t base = 0;
  for (int i = bucket.first_tensor; i < bucket.last_tensor; ++i) {
    if (tensors_[i].count() == 0) continue;
    // As integers, because subtracting pointers into different allocations is undefined.
    uintptr_t start = reinterpret_cast<uintptr_t>(adopted_[i]) - 4 * (layout_.offsets[i] - bucket.begin);
    if (base == 0) base = start;
    if (start != base) return nullptr;
  }
  // A gap after the last tensor is not part of the gradients, so it must not be written.
  const int last = bucket.last_tensor - 1;
  if (layout_.offsets[last] + tensors_[last].count() != bucket.end) return nullptr;
  return reinterpret_cast<float*>(base);
}

void Reducer::stage(const Bucket& bucket, bool in) {
  const Stream& stream = lane_of(bucket).stream;
  for (int i = bucket.first_tensor; i < bucket.last_tensor; ++i) {
    float* flat = gradients_.as<float>() + layout_.offsets[i];
    size_t bytes = static_cast<size_t>(tensors_[i].count()) * sizeof(float);
    copy(stream, in ? flat : adopted_[i], in ? adopted_[i] : flat, bytes);
  }
}

}  // namespace gradwire
