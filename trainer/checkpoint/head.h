// What a checkpoint says of itself: where its run was, and with which settings.
#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <vector>

#include "collectives/plan/link_costs.h"
#include "trainer/checkpoint/safetensors.h"
#include "trainer/config/config.h"

namespace gradwire {

// The key of every file's metadata whose value is this description, as JSON text.
inline constexpr const char* kAboutKey = "gradwire";

struct Position {
  int64_t step = 0;    // optimizer steps done
  int64_t epoch = 0;   // from 0
  int64_t images = 0;  // images of this epoch already used, over all ranks
};

struct CheckpointHead {
  std::string path;  // of the checkpoint's folder
  Position position;
  int world = 1;
  std::string compression;
  // What schedule=auto based its choice on, if measured: a new measurement could lead to another schedule.
  std::optional<LinkCosts> links;
  std::string config;  // the run's, as JSON text
  std::string parts;   // common to all files of the checkpoint, as JSON text
};

// Reads headers only. Throws BadInput, which names the file, when something is missing or inconsistent.
CheckpointHead read_head(const std::string& checkpoint);
// Throws BadInput when the run cannot continue from there (another model or optimizer, or fewer steps than
// the checkpoint has done). Returns a note for each setting that changes how the run continues.
std::vector<std::string> compare_with_head(const TrainConfig& config, const CheckpointHead& head);

// Measured link costs, as a file has them: latency and rate of four patterns, of memory that is read and, where the
// transport has one, of its own allreduce. Nothing for anything else.
nlohmann::ordered_json links_json(const LinkCosts& links);
std::optional<LinkCosts> links_of(const nlohmann::ordered_json& json);

// Returns the description of rank `rank`'s files, to which the checkpoint's "id" is added. `links`: null
// unless measured.
nlohmann::ordered_json about_file(const TrainConfig& config, const Position& at, int rank,
                                  const LinkCosts* links);
// Throws BadInput, which names `file`, unless it was saved together with the file that `head` was read from.
void check_same_checkpoint(const CheckpointHead& head, const SafetensorsReader& file);
// Reads the head of a file. Throws BadInput, which names the file, unless it is complete.
nlohmann::ordered_json about_of(const SafetensorsReader& file);

}  // namespace gradwire
