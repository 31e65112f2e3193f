// Evaluates the trained model on this rank's share of the test set.
#pragma once

#include "collectives/communicator/communicator.h"
#include "trainer/data/dataset.h"
#include "trainer/data/loader.h"
#include "trainer/model/vit.h"
#include "trainer/train/rank_reports.h"

namespace gradwire {

class Evaluator {
 public:
  // Allocates an evaluator. `data` and `model` must outlive the object. The model's ops run on `stream`.
  Evaluator(const TrainConfig& config, const Dataset& data, const Communicator& comm, const Stream& stream,
            const Vit& model);

  // Returns the memory of an evaluator in bytes, without the weights of `model`.
  static int64_t bytes(const TrainConfig& config, const Stream& stream, const Vit& model);

  // Returns the loss and correct answers on this rank's images. The ranks' shares cover the test set exactly
  // once. Waits for the stream.
  RankReports::Report run();

 private:
  Stream stream_;
  Loader loader_;
  Vit model_;      // shares the weights of the trained model
  Buffer totals_;  // sum of losses and correct answers, two doubles
};

}  // namespace gradwire
