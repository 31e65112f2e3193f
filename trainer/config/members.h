// The file by which a process that joins a running job (--join) finds it: --members, kept by the job's rank 0.
#pragma once

#include <string>

namespace gradwire {

// `launched`: with how many ranks the run began. `doors`: Transport::doors().
std::string members_text(int launched, const std::string& doors);

struct Members {
  int launched = 0;
  std::string doors;
};
// Throws BadInput if the file cannot be read or is none of these.
Members read_members(const std::string& path);

}  // namespace gradwire
