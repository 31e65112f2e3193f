// --overlap-forward: the end of a step, inside the next one's forward.
//
// On a slow link the exchange of a step's gradients goes on long after backward, and the first layers' gradients, which
// the next forward needs first, are ready last. So the compute stream waits for each bucket, and updates its weights,
// just before the first op that uses them; and of the buckets that wait for the link, the one that forward needs first
// is the next. The last to arrive are then the last layers', and little is left to compute before the link has work
// again. A bucket's arithmetic does not change, so neither does any bit.
#pragma once

#include <cstdint>
#include <vector>

#include "collectives/communicator/communicator.h"
#include "collectives/reducer/reducer.h"
#include "runtime/device.h"
#include "trainer/model/vit.h"
#include "trainer/train/optimizer.h"
#include "trainer/train/training_marks.h"

namespace gradwire {

class DeferredUpdate {
 public:
  // The model's ops are on `compute`. All must outlive the object.
  DeferredUpdate(Communicator& comm, const Stream& compute, Reducer& reducer, Optimizer& optimizer,
                 Vit& model);

  // Where a step's marks are made; for as many steps as are in flight.
  void prepare(TrainingMarks& marks) const;
  // A backward that wrote `gradients` is enqueued, and its update, with this learning rate, is due.
  void begin(TrainingMarks& marks, const float* gradients, double lr);
  // Vit's BlockCalls: updates the weights of the block.
  void begins(int block);
  // Updates what is left, and ends the step. Nothing happens if none is due.
  void finish();

  // Once, when measured() is long enough: orders the exchanges by the times so far. Collective, and blocks.
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
  std::vector<std::vector<int>> buckets_of_;  // by block
  std::vector<bool> due_;                     // by bucket
  TrainingMarks* marks_ = nullptr;            // of the step whose update is due
  const float* gradients_ = nullptr;
  int measured_steps_ = -kWarmUpSteps;
  double backward_ms_ = 0, communication_ms_ = 0;
  bool ordered_ = false;
};

// The order of the buckets' exchanges: whenever the link is free, the last of those that backward has filled, which
// forward uses first. `share`: backward's time relative to that of all exchanges.
std::vector<int> exchange_order(const std::vector<BucketRange>& buckets, double share);

}  // namespace gradwire
