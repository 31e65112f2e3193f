// Folders of checkpoints. DIR/step-000000030/ is a checkpoint after 30 steps; it comes into being under the
// name step-000000030.tmp and gets its own by one rename when all of its files are on the disk. So whatever
// kills the run, a folder without .tmp is whole.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace gradwire {

std::string weights_path(const std::string& checkpoint);
std::string state_path(const std::string& checkpoint, int rank, int world);

// How many ranks made this checkpoint; 0 when one of its files is missing.
int checkpoint_world(const std::string& checkpoint);

struct FoundCheckpoint {
  std::optional<std::string> path;   // of the newest one that has all its files
  std::vector<std::string> ignored;  // one line for each newer or unfinished one that was passed over
};
// `directory` is a folder of checkpoints, or one of them. Throws BadInput when it is no folder.
FoundCheckpoint find_checkpoint(const std::string& directory);
// A folder that is not there holds none.
bool holds_checkpoints(const std::string& directory);
// Throws BadInput unless checkpoints could be written there now. Creates nothing.
void check_checkpoint_directory(const std::string& directory);

// Writing, by one rank: begin, then all ranks write files into path(), then commit.
class NewCheckpoint {
 public:
  // Makes the folder, and removes what earlier, killed writers have left.
  NewCheckpoint(const std::string& directory, int64_t step);
  // Where it is while it is written: also known to ranks that have not made it.
  static std::string temporary_path(const std::string& directory, int64_t step);
  static std::string final_path(const std::string& directory, int64_t step);
  // Onto the disk, into its place; then removes all but the last `keep` checkpoints.
  void commit(int keep);

 private:
  std::string directory_;
  int64_t step_;
};

}  // namespace gradwire
