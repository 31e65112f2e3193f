// Runs this program once per rank on this machine.
#pragma once

#include <string>
#include <vector>

namespace gradwire::bench {

// A temporary folder, removed by the destructor.
class ScratchFolder {
 public:
  ScratchFolder();
  ~ScratchFolder();
  ScratchFolder(const ScratchFolder&) = delete;
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

// Runs this program with `arguments` as ranks 0 to world - 1, identified by RANK, WORLD_SIZE, LOCAL_RANK and
// LOCAL_WORLD_SIZE. Blocks until all ranks have ended. Rank 0 inherits stdout; the output of other ranks is
// not shown. Throws Error with the error message of the first rank that failed.
void run_as_ranks(const std::vector<std::string>& arguments, int world);

// Returns the last line that a child has written to the file `fd`.
std::string last_line(int fd);

}  // namespace gradwire::bench
