// The file of --compression auto:plan=FILE: a choice that other runs of the same model and world repeat
// without measuring.
#pragma once

#include <optional>
#include <string>

#include "trainer/config/config.h"
#include "trainer/log/observer.h"
#include "trainer/measure/ranks.h"

namespace gradwire {

struct SavedPlan {
  std::string compression;
  double bucket_mb = 25;
  std::optional<LinkCosts> links;  // from which schedule=auto chooses
  PredictedStep predicted;
  std::string choice;  // the record of the choice for the log, as JSON

  // Returns the plan in a file; empty if there is no file. Throws BadInput, which names the file and the
  // remedy, if the plan is for another model or number of ranks, or cannot be read.
  static std::optional<SavedPlan> read(const std::string& path, const TrainConfig& config);
  // Writes the file for a run with these settings. Throws Error.
  void write(const std::string& path, const TrainConfig& config) const;
};

}  // namespace gradwire
