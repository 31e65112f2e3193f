// A run's secret: a process that knows it may join. docs/running.md is the user's guide.
#pragma once

#include <string>

namespace gradwire {

// Returns GRADWIRE_SECRET, or the content of GRADWIRE_SECRET_FILE without its line end; "" if neither
// variable is set. Throws BadInput for a file that is unreadable, empty, or readable by other users.
std::string secret_from_environment();

// Returns 32 unpredictable characters for use as a secret.
std::string random_secret();

}  // namespace gradwire
