// Folders of checkpoints. DIR/step-000000030/ is the checkpoint after 30 steps. It is written as
// step-000000030.tmp and renamed when all its files are on disk, so a folder without .tmp is always complete.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "trainer/data/safetensors.h"

namespace gradwire {

std::string weights_path(const std::string& checkpoint);
std::string state_path(const std::string& checkpoint, int rank, int world);

// Returns the number of ranks that saved this checkpoint; 0 if one of its files is missing.
int checkpoint_world(const std::string& checkpoint);

struct FoundCheckpoint {
  std::optional<std::string> path;   // newest checkpoint with all its files and finite values
  std::vector<std::string> ignored;  // one message for each newer or unfinished checkpoint that was skipped
};
// Finds the newest complete checkpoint. `directory`: a folder of checkpoints, or a checkpoint. Throws
// BadInput if `directory` is not a folder.
FoundCheckpoint find_checkpoint(const std::string& directory);
// Returns whether the folder exists and contains complete checkpoints.
bool holds_checkpoints(const std::string& directory);
// Throws BadInput, which names `flag`, unless this process can write files into the folder. The folder need
// not exist. Creates nothing.
void check_output_directory(const std::string& flag, const std::string& directory);

// The lock of a checkpoint folder. Two runs must not write to one folder, because each would remove the
// other's checkpoints. The rank that creates the checkpoints holds the lock until the object or the process
// ends. Creates `directory`. Throws BadInput, which names the run that holds the lock.
class FolderLock {
 public:
  // Acquires the lock. `displaces`: takes the lock from its holder, the run's previous rank 0, which may be a
  // stopped process and must not write afterwards.
  explicit FolderLock(const std::string& directory, bool displaces = false);

 private:
  FileDescriptor file_;
};

// A checkpoint that is being written. One rank creates this object, all ranks write files to
// temporary_path(), then the creating rank calls commit().
class NewCheckpoint {
 public:
  // Creates the folder, and removes unfinished folders of earlier runs. Warns if a folder cannot be removed.
  NewCheckpoint(const std::string& directory, int64_t step);
  // Return the path during writing and after commit(). Static, so that ranks without the object can compute
  // both paths.
  static std::string temporary_path(const std::string& directory, int64_t step);
  static std::string final_path(const std::string& directory, int64_t step);
  // Syncs and renames the folder, and removes all but the last `keep` checkpoints and the last whose values
  // are `finite`. Warns if a checkpoint cannot be removed.
  void commit(int keep, bool finite = true);

 private:
  std::string directory_;
  int64_t step_;
};

}  // namespace gradwire
