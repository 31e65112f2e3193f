// --overlap-forward: the end of a step, inside the next step's forward.
//
// On a slow link the exchange of a step's gradients continues long after backward. The first layers'
// gradients, which the next forward needs first, are ready last. The compute stream therefore waits for each
// bucket, and updates its weights, just before the first op that uses them. Of the buckets that wait for the
// link, the bucket that forward needs first is sent next. The last layers' gradients then arrive last, and
// little computation remains before the link is busy again. The arithmetic of a bucket does not change, so
// the bits do not change.
#pragma once

#include <cstdint>
#include <vector>

#include "collectives/communicator/communicator.h"
#include "collectives/reducer/reducer.h"
#include "runtime/device/device.h"
#include "trainer/model/vit.h"
#include "trainer/train/optimizer_state.h"
#include "trainer/train/run_reporter.h"

namespace gradwire {

class DeferredUpdate {
 public:
  // Prepares deferred updates. `compute`: the stream of the model's ops. All arguments must outlive the
  // object.
  DeferredUpdate(Communicator& comm, const Stream& compute, Reducer& reducer, Optimizer& optimizer,
                 Vit& model);

  // Creates the events of a step's marks. Call once for each step in flight.
  void prepare(TrainingMarks& marks) const;
  // Starts the update of a step. Call after enqueuing the backward that wrote `gradients`.
  void begin(TrainingMarks& marks, const float* gradients, double lr);
  // The model's EnterBlock: updates the weights of `block`.
  void enter_block(int block);
  // Updates the weights of the remaining buckets and ends the step. Does nothing if no update is pending.
  void finish();

  // Orders the exchanges by the times measured so far. Call once, when orders_now(). Collective; blocks.
  void order_exchanges();
  void measured(double backward_ms, double communication_ms);
  bool orders_now() const { return measured_steps_ == kMeasuredSteps && !ordered_; }

 private:
  static constexpr int kMeasuredSteps = 3, kWarmUpSteps = 1;

  void update(int bucket);

  Communicator& comm_;
  const Stream stream_;
  Reducer& reducer_;
  Optimizer& optimizer_;
  Vit& model_;
  std::vector<std::vector<int>> buckets_of_;  // buckets of each block
  std::vector<bool> due_;                     // whether the update of a bucket is pending
  TrainingMarks* marks_ = nullptr;            // marks of the step whose update is pending
  const float* gradients_ = nullptr;
  int measured_steps_ = -kWarmUpSteps;
  double backward_ms_ = 0, communication_ms_ = 0;
  bool ordered_ = false;
};

// Returns the order of the buckets' exchanges. A free link next sends the full bucket that backward filled
// last, because forward uses this bucket first. `share`: time of backward / time of all exchanges.
std::vector<int> exchange_order(const std::vector<BucketRange>& buckets, double share);

}  // namespace gradwire
