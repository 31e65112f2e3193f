// Gradients that somebody else owns: reduced where they are, or copied into the flat buffer and out of it.
#include "collectives/reducer/reducer.h"

#include <fmt/format.h>

#include <algorithm>

#include "runtime/error.h"

namespace gradwire {

void Reducer::adopt(std::span<float* const> gradients) {
  std::lock_guard lock(mutex_);
  if (gradients.size() != tensors_.size()) {
    throw BadInput(
        fmt::format("Reducer::adopt: {} addresses for {} tensors", gradients.size(), tensors_.size()));
  }
  for (size_t i = 0; i < tensors_.size(); ++i) {
    if (ready_[i])
      throw BadInput("Reducer::adopt in the middle of a step: '" + tensors_[i].name + "' is ready");
    if (gradients[i] == nullptr && tensors_[i].count() > 0) {
      throw BadInput("Reducer::adopt: the address of gradient '" + tensors_[i].name + "' is null");
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
  return adopted_.empty() ? gradients_.as<float>() + offset(i) : adopted_.at(i);
}

void Reducer::allocate_gradients() {
  gradients_ = make_buffer<float>(comm_.device(), layout_.elements);
  fill_zero(stream_, gradients_.data(), gradients_.bytes());
}

// Where the bucket begins if the adopted gradients lie as in the flat buffer; null if they don't.
float* Reducer::common_base(const Bucket& bucket) const {
  uintptr_t base = 0;
  for (int i = bucket.first_tensor; i < bucket.last_tensor; ++i) {
    if (tensors_[i].count() == 0) continue;
    // As integers: addresses of different allocations may not be subtracted as pointers.
    uintptr_t start = reinterpret_cast<uintptr_t>(adopted_[i]) - 4 * (layout_.offsets[i] - bucket.begin);
    if (base == 0) base = start;
    if (start != base) return nullptr;
  }
  // The gap after the last tensor is not the caller's to write into.
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
