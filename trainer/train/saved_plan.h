// The file of --compression auto:plan=FILE: a choice that other runs of the same model and world repeat
// without measuring.
#pragma once

#include <optional>
#include <string>

#include "trainer/config/config.h"
#include "trainer/log/observer.h"
#include "trainer/measure/recommend.h"
#include "trainer/measure/ranks.h"

namespace gradwire {

struct SavedPlan {
  std::string compression;
  double bucket_mb = 25;
  std::optional<LinkCosts> links;  // from which schedule=auto chooses
  PredictedStep predicted;
  std::string choice;  // the record of the choice for the log, as JSON

  // Returns the plan in the request's file; empty if there is no file. `bucket_mb`: the given --bucket-mb.
  // Throws BadInput, which names the file and the remedy, if the plan is for another model or number of
  // ranks, cannot be read, or is not one that this run may choose.
  static std::optional<SavedPlan> read(const AutoCompression& request, const TrainConfig& config,
                                       std::optional<double> bucket_mb);
  // Writes the file for a run with these settings. Throws Error.
  void write(const std::string& path, const TrainConfig& config) const;
};

}  // namespace gradwire
