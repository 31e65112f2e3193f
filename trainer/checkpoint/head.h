// The description in a checkpoint's files: the position in the run, and the run's settings.
#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <vector>

#include "collectives/plan/link_costs.h"
#include "trainer/config/config.h"
#include "trainer/data/safetensors.h"

namespace gradwire {

// The metadata key in every file of a checkpoint. The value is the description as JSON text.
inline constexpr const char* kAboutKey = "gradwire";

struct Position {
  int64_t step = 0;    // optimizer steps done
  int64_t epoch = 0;   // counted from 0
  int64_t images = 0;  // images of this epoch already used, over all ranks
};

struct CheckpointHead {
  std::string path;  // the checkpoint's folder
  Position position;
  int world = 1;
  std::string compression;
  double bucket_mb = 25;
  // The measurements on which schedule=auto based its choice, if any. New measurements could change the
  // schedule.
  std::optional<LinkCosts> links;
  std::string config;  // the run's settings as JSON text
  std::string parts;   // the values that all files of the checkpoint share, as JSON text
};

// Returns the head of a checkpoint. Reads only the files' headers. Throws BadInput, which names the file,
// when a file or value is missing or inconsistent.
CheckpointHead read_head(const std::string& checkpoint);
// Returns a note for each setting that changes how the run continues from the checkpoint. Throws BadInput
// when the run cannot continue (another model or optimizer, an unknown value of --shard, or fewer steps than
// the checkpoint has done).
std::vector<std::string> compare_with_head(const TrainConfig& config, const CheckpointHead& head);

// Convert measured link costs to and from JSON: latency and rate of four patterns and, if the transport has a
// library allreduce, of this allreduce. Invalid JSON gives nullopt.
nlohmann::ordered_json links_json(const LinkCosts& links);
std::optional<LinkCosts> links_of(const nlohmann::ordered_json& json);

// Returns the description of rank `rank`'s files; add the checkpoint's "id". `links`: null unless measured.
nlohmann::ordered_json about_file(const TrainConfig& config, const Position& at, int rank,
                                  const LinkCosts* links);
// Throws BadInput, which names `file`, unless `file` and the file of `head` were saved together.
void check_same_checkpoint(const CheckpointHead& head, const SafetensorsReader& file);
// Returns the head of a file. Throws BadInput, which names the file, if the head is incomplete.
nlohmann::ordered_json about_of(const SafetensorsReader& file);

}  // namespace gradwire
