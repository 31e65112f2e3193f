// Starts this program once per rank on this machine.
#pragma once

#include <string>
#include <vector>

namespace gradwire::bench {

// A folder that is gone at the end.
class ScratchFolder {
 public:
  ScratchFolder();
  ~ScratchFolder();
  ScratchFolder(const ScratchFolder&) = delete;
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

// Runs this program with `arguments` as ranks 0 to world - 1, told by RANK, WORLD_SIZE, LOCAL_RANK and
// LOCAL_WORLD_SIZE, and waits for all. Rank 0 has this process's stdout; the others' is not shown. Throws
// Error with the words of the first that failed; no process outlives this call.
void run_as_ranks(const std::vector<std::string>& arguments, int world);

}  // namespace gradwire::bench
