// Folders of checkpoints. DIR/step-000000030/ is the checkpoint after 30 steps. It is written as
// step-000000030.tmp and renamed when all of its files are on disk. So a folder without .tmp is complete,
// however the run ended.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "trainer/checkpoint/safetensors.h"

namespace gradwire {

std::string weights_path(const std::string& checkpoint);
std::string state_path(const std::string& checkpoint, int rank, int world);

// How many ranks made this checkpoint; 0 when one of its files is missing.
int checkpoint_world(const std::string& checkpoint);

struct FoundCheckpoint {
  std::optional<std::string> path;   // of the newest one that has all its files
  std::vector<std::string> ignored;  // a message for each newer or unfinished one that was skipped
};
// `directory` is a folder of checkpoints, or a checkpoint. Throws BadInput when it is not a folder.
FoundCheckpoint find_checkpoint(const std::string& directory);
// False for a folder that does not exist.
bool holds_checkpoints(const std::string& directory);
// Throws BadInput, which names `flag`, unless files can be written into this folder, which need not exist yet.
// Creates nothing.
void check_output_directory(const std::string& flag, const std::string& directory);

// Two runs must not write to one folder: each would remove the other's checkpoints. Made by the rank that makes
// the folders; released with the object or the process, however that ends. Creates `directory`. Throws BadInput,
// which names the run that holds the lock.
class FolderLock {
 public:
  // `displaces`: takes the lock from its holder, who is not to write any more: the run's rank 0 before this one, which
  // may have been stopped and not ended.
  explicit FolderLock(const std::string& directory, bool displaces = false);

 private:
  FileDescriptor file_;
};

// One rank creates this object, all ranks write files to temporary_path(), then the one rank commits.
class NewCheckpoint {
 public:
  // Creates the folder, and removes unfinished ones of earlier runs, or warns that it cannot.
  NewCheckpoint(const std::string& directory, int64_t step);
  // Static, so that ranks without the object know the paths.
  static std::string temporary_path(const std::string& directory, int64_t step);
  static std::string final_path(const std::string& directory, int64_t step);
  // Syncs the folder, renames it, and removes all but the last `keep` checkpoints, or warns that it cannot.
  void commit(int keep);

 private:
  std::string directory_;
  int64_t step_;
};

}  // namespace gradwire
