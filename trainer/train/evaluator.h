// One rank's share of the test set, run forward with the weights of the model being trained.
#pragma once

#include "collectives/communicator/communicator.h"
#include "trainer/data/dataset.h"
#include "trainer/data/loader.h"
#include "trainer/model/vit.h"
#include "trainer/train/rank_reports.h"

namespace gradwire {

class Evaluator {
 public:
  // `data` and `model` (on the same stream) outlive this object.
  Evaluator(const TrainConfig& config, const Dataset& data, const Communicator& comm, const Stream& stream,
            const Vit& model);

  // Loss and right answers of this rank's images, each image of the test set being some rank's. Waits for the
  // stream.
  RankReports::Report run();

 private:
  Stream stream_;
  Loader loader_;
  Vit model_;      // shares its weights
  Buffer totals_;  // two doubles
};

}  // namespace gradwire
