#include "trainer/train/weight_window.h"

#include <algorithm>

namespace gradwire {
ParameterLayout WeightWindow::layout(const Reducer& reducer) {
  ParameterLayout layout;
  for (int i = 0; i < reducer.tensors(); ++i) {
    const auto bucket = static_cast<size_t>(reducer.bucket_of(i));
    layout.offsets.push_back(offset(reducer, bucket) + reducer.offset(i) - reducer.ranges()[bucket].begin);
  }
  layout.elements =
      std::min<int64_t>(kSlots, static_cast<int64_t>(reducer.ranges().size())) * reducer.largest_bucket();
  return layout;
}

int64_t WeightWindow::offset(const Reducer& reducer, size_t bucket) {
  return static_cast<int64_t>(bucket % kSlots) * reducer.largest_bucket();
}

WeightWindow::WeightWindow(Communicator& comm, const Stream& compute, const Reducer& reducer, Vit& model,
                           const Programs& gathers, const Programs& dense)
    : compute_(compute),
      transfers_(comm.transfers()),
      stream_(Stream::create(comm.device(), "gather weights", Stream::Priority::high)),
      reducer_(reducer),
      model_(model),
      gathers_(gathers),
      dense_(dense),
      blocks_(vit_blocks(model.parameters())),
      free_(Event::create(comm.device())) {
  for (Slot& slot : slots_) slot.gathered = Event::create(comm.device());
}

WeightWindow::~WeightWindow() {
  // Synchronize both streams, even if one stream has failed.
  for (const Stream& stream : {stream_, transfers_}) {
    try {
      stream.synchronize();
    } catch (...) {  // ignore errors: the failure is already known
    }
  }
}

void WeightWindow::enter_block(int block, int next) {
  use(bucket_of(block));
  if (next < 0) return;
  if (const int bucket = bucket_of(next); bucket != bucket_of(block)) fetch(bucket);
}

void WeightWindow::changed() {
  for (Slot& slot : slots_) slot.bucket = -1;
  fetch(static_cast<int>(gathers_.size()) - 1);
}

void WeightWindow::visit(const std::function<void(const float* weights, int64_t count)>& each) {
  for (int bucket = 0; bucket < static_cast<int>(gathers_.size()); ++bucket) {
    use(bucket);
    const auto b = static_cast<size_t>(bucket);
    each(model_.weights().as<const float>() + offset(reducer_, b), reducer_.ranges()[b].elements());
  }
}

void WeightWindow::use(int bucket) {
  fetch(bucket);
  compute_.wait(slots_[static_cast<size_t>(bucket % kSlots)].gathered);
}

void WeightWindow::fetch(int bucket) {
  Slot& slot = slots_[static_cast<size_t>(bucket % kSlots)];
  if (slot.bucket == bucket) return;
  free_.record(compute_);
  stream_.wait(free_);
  const auto b = static_cast<size_t>(bucket);
  gathers_[b]->run(stream_);
  model_.round_weights(stream_, offset(reducer_, b), reducer_.ranges()[b].elements());
  slot.gathered.record(stream_);
  slot.bucket = bucket;
  bytes_sent_ += static_cast<uint64_t>(gathers_[b]->info().bytes_sent);
  dense_bytes_ += static_cast<uint64_t>(dense_[b]->info().bytes_sent);
}

}  // namespace gradwire
