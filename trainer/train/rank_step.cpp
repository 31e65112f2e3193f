// One step of a rank: enqueues the work of a step, and reads the results of the previous step.
#include <fmt/format.h>

#include <chrono>
#include <functional>
#include <optional>
#include <utility>

#include "runtime/device/nvtx.h"
#include "runtime/util/error.h"
#include "trainer/train/learning_rate.h"
#include "trainer/train/rank.h"

namespace gradwire {

void RankTrainer::enqueue_step(int64_t step) {
  Slot& slot = slots_[static_cast<size_t>(step % 2)];
  profile(config_, comm_, stream_, step);
  if (Tracer* tracer = trace_.tracer()) tracer->begin_step(step, step < graph_from_);
  slot.enqueue_begin = std::chrono::steady_clock::now();
  slot.step = step;
  slot.lr = learning_rate(config_, step);
  if (!deferred_) optimizer_.prepare(stream_, step, slot.lr);
  slot.micros.front().data.record(stream_);
  if (config_.graph) {
    enqueue_graph(slot);
  } else {
    enqueue_work(slot);
  }
  copy(stream_, slot.totals.data(), totals_.data(), totals_.bytes());
  if (!deferred_) slot.end.record(stream_);
  if (shared_.elastic != nullptr) {
    take_snapshot(step + 1);
    slot.snapshot_done.record(stream_);
  }
  slot.enqueue_end = std::chrono::steady_clock::now();
}

// Captures a step's work, or launches the captured graph. A graph contains the marks of its slot and the
// addresses of its batches, so even and odd steps have separate graphs.
void RankTrainer::enqueue_graph(Slot& slot) {
  std::vector<Loader::Batch> batches;
  for (int64_t micro = 0; micro < config_.accumulate; ++micro) batches.push_back(next_batch(slot.step));
  const bool replays = static_cast<bool>(slot.graph);
  for (size_t micro = 0; replays && micro < batches.size(); ++micro) {
    if (batches[micro].images != slot.batches[micro].images)
      throw Error("the loader's slots are out of step");
  }
  slot.batches = std::move(batches);
  if (slot.step < graph_from_) {
    enqueue_work(slot);
  } else {
    if (!replays) {
      slot.graph = Graph::capture(stream_, [&] { enqueue_work(slot); });
      slot.captured = slot.step;
    }
    slot.graph.launch();
    if (replays) reducer_.replayed(slot.captured);
  }
  for (int64_t micro = 0; micro < config_.accumulate; ++micro) loader_.release(stream_);
}

void RankTrainer::enqueue_work(Slot& slot) {
  const int64_t step = slot.step;
  // Scale the gradients to the mean over this rank's images, or to this rank's share of the mean over all
  // images. The reducer divides by the number of ranks.
  const float grad_scale = static_cast<float>(comm_.world()) / static_cast<float>(config_.global_batch());
  const bool dumps = dump_ && step == config_.gradients_step;
  if (dumps && carried_) {
    throw BadInput(
        fmt::format("--dump-gradients: after --resume with another compression or number of ranks, the "
                    "gradients of step {} begin with the checkpoint's residuals; dump a later step",
                    step));
  }
  const bool samples = samples_gradients(step);
  const std::function<void(int)> ready = [&](int i) {
    if (dumps) dump_->take(stream_, i, reducer_.gradient(i));
    if (samples) sample_->take(stream_, i, reducer_.gradient(i));
    reducer_.ready(i, stream_);
  };

  for (int64_t micro = 0; micro < config_.accumulate; ++micro) {
    TrainingMarks::Micro& marks = slot.micros[static_cast<size_t>(micro)];
    if (micro > 0) marks.data.record(stream_);
    std::optional<NvtxRange> range;
    const Loader::Batch batch = config_.graph ? slot.batches[static_cast<size_t>(micro)] : next_batch(step);
    marks.forward.record(stream_);
    range.emplace(Activity::forward, step);
    // backward() adds to the residuals in the gradient buffer, and also to the totals, which must therefore
    // start at zero.
    if (micro == 0 && carried_) fill_zero(stream_, totals_.data(), totals_.bytes());
    model_.forward(batch.images, batch.count);
    if (deferred_) deferred_->finish();  // ends the previous step
    range.reset();
    marks.backward.record(stream_);
    // Only the last micro-batch completes a gradient.
    bool completes = micro + 1 == config_.accumulate;
    range.emplace(Activity::backward, step);
    model_.backward(batch.labels, totals_.as<double>(), grad_scale, gradients_, micro > 0 || carried_,
                    completes ? ready : std::function<void(int)>());
    range.reset();
    marks.done.record(stream_);
    if (!config_.graph) loader_.release(stream_);
  }
  carried_ = false;
  if (deferred_) return deferred_->begin(slot, gradients_, slot.lr);
  enqueue_update(slot);
}

void RankTrainer::enqueue_update(Slot& slot) {
  reducer_.wait(stream_);
  slot.reduced.record(stream_);
  NvtxRange range(Activity::optimizer, slot.step);
  if (shards_) {
    optimizer_.step(stream_, shards_->weights(), gradients_);
    shards_->share_weights();
  } else {
    optimizer_.step(stream_, {model_.weights().as<float>()}, gradients_, model_.rounded_weights());
  }
}

Loader::Batch RankTrainer::next_batch(int64_t step) {
  NvtxRange range(Activity::batch, step);
  const Loader::Batch batch = loader_.next(stream_);
  if (batch.count != images_) {
    throw Error(
        fmt::format("the loader gave a training batch of {} images, expected {}", batch.count, images_));
  }
  return batch;
}

void RankTrainer::harvest(Slot& slot, const Event* next_start) {
  const Event& end = next_start != nullptr ? *next_start : slot.end;
  slot.wait_begin = std::chrono::steady_clock::now();
  end.synchronize();
  if (deferred_) slot.end.synchronize();  // the step ends inside the next step
  // Report only steps that will not be repeated.
  if (shared_.elastic != nullptr) {
    slot.snapshot_done.synchronize();
    comm_.check();
    joiners_wait_ = shared_.elastic->joiners_wait(slot.step + 1);
  }
  slot.wait_end = std::chrono::steady_clock::now();
  comm_.check();
  if (dump_ && slot.step == config_.gradients_step) dump_->write();
  reporter_.report_step({.marks = slot,
                         .end = end,
                         .totals = slot.totals.as<double>(),
                         .epoch = data_step(slot.step) / steps_per_epoch_,
                         .lr = slot.lr,
                         .weights = shards_ ? shards_->sent() : WeightShards::Sent()});
  if (drift_) check_plan(slot, end);
  if (deferred_) deferred_->measured(slot.backward_ms(), reducer_.stats(slot.step).comm_ms);
  trace_.add(slot, end, stream_.name(), reducer_);
}

}  // namespace gradwire
