// The file of --members, which rank 0 writes. Processes that join a running job (--join) read the ranks'
// addresses from this file.
#pragma once

#include <string>

namespace gradwire {

// Returns the text of a members file. `launched`: the world size at launch. `invitation`: the text of
// Admission::invitation().
std::string members_text(int launched, const std::string& invitation);

struct Members {
  int launched = 0;
  std::string invitation = {};
};
// Reads a members file. Throws BadInput if the file cannot be read or is not a members file.
Members read_members(const std::string& path);

}  // namespace gradwire
