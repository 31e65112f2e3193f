#include "trainer/train/deferred_update.h"

#include <algorithm>

#include "collectives/agreement/statements.h"
#include "collectives/transport/transport.h"
#include "runtime/device/nvtx.h"

namespace gradwire {

DeferredUpdate::DeferredUpdate(Communicator& comm, const Stream& compute, Reducer& reducer,
                               Optimizer& optimizer, Vit& model)
    : comm_(comm),
      stream_(compute),
      reducer_(reducer),
      optimizer_(optimizer),
      model_(model),
      due_(reducer.ranges().size()) {
  // A block can span several buckets, and a bucket several blocks.
  std::vector<int> first = vit_blocks(model.parameters());
  first.push_back(reducer.tensors());
  for (size_t block = 0; block + 1 < first.size(); ++block) {
    std::vector<int>& buckets = buckets_of_.emplace_back();
    for (int b = reducer.bucket_of(first[block]); b <= reducer.bucket_of(first[block + 1] - 1); ++b) {
      buckets.push_back(b);
    }
  }
}

void DeferredUpdate::prepare(TrainingMarks& marks) const {
  auto event = [&] { return Event::create_timer(stream_.device()); };
  while (marks.updates.size() < due_.size()) marks.updates.push_back({event(), event(), event()});
}

void DeferredUpdate::begin(TrainingMarks& marks, const float* gradients, double lr) {
  marks_ = &marks;
  gradients_ = gradients;
  marks.updated_in_forward = true;
  due_.assign(due_.size(), true);
  optimizer_.prepare(stream_, marks.step, lr);
}

void DeferredUpdate::enter_block(int block) {
  if (marks_ == nullptr) return;
  for (int bucket : buckets_of_[static_cast<size_t>(block)]) update(bucket);
}

void DeferredUpdate::update(int bucket) {
  const auto b = static_cast<size_t>(bucket);
  if (!due_[b]) return;
  due_[b] = false;
  NvtxRange range(Activity::optimizer, marks_->step);
  TrainingMarks::Update& marks = marks_->updates[b];
  const BucketRange& elements = reducer_.ranges()[b];
  marks.wait.record(stream_);
  reducer_.wait_for(bucket, stream_);
  marks.begin.record(stream_);
  optimizer_.step(stream_, model_.weights().as<float>(), gradients_, {elements.begin, elements.end},
                  model_.rounded_weights());
  marks.end.record(stream_);
}

void DeferredUpdate::finish() {
  if (marks_ == nullptr) return;
  for (auto b = static_cast<int>(due_.size()) - 1; b >= 0; --b) {
    if (due_[static_cast<size_t>(b)]) marks_->updated_in_forward = false;
    update(b);
  }
  reducer_.wait(stream_);
  marks_->reduced.record(stream_);
  marks_->end.record(stream_);
  marks_ = nullptr;
}

void DeferredUpdate::measured(double backward_ms, double communication_ms) {
  if (measured_steps_ == kMeasuredSteps) return;
  if (measured_steps_ >= 0) {
    backward_ms_ += backward_ms;
    communication_ms_ += communication_ms;
  }
  ++measured_steps_;
}

void DeferredUpdate::order_exchanges() {
  double backward_ms = 0, communication_ms = 0;
  for (const std::vector<double>& of :
       all_gather(comm_.transport(), stream_, {backward_ms_, communication_ms_},
                  "the order of the buckets' exchanges")) {
    backward_ms += of[0];
    communication_ms += of[1];
  }
  ordered_ = true;
  reducer_.launch_in(
      exchange_order(reducer_.ranges(), communication_ms > 0 ? backward_ms / communication_ms : 1));
}

std::vector<int> exchange_order(const std::vector<BucketRange>& buckets, double share) {
  std::vector<int> order;
  std::vector<int> full;  // buckets that are full but not yet sent
  double now = 0;         // time, in elements that the link can send
  for (size_t b = 0; b < buckets.size() || !full.empty();) {
    auto full_at = [&] { return share * static_cast<double>(buckets[b].end); };
    if (full.empty()) now = std::max(now, full_at());
    while (b < buckets.size() && full_at() <= now) full.push_back(static_cast<int>(b++));
    order.push_back(full.back());
    full.pop_back();
    now += static_cast<double>(buckets[static_cast<size_t>(order.back())].elements());
  }
  return order;
}

}  // namespace gradwire
