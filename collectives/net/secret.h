// A run's secret: a process that knows it may join. docs/running.md is the user's guide.
#pragma once

#include <string>

namespace gradwire {

// Returns the secret of a text, without a byte order mark and without blanks and line ends at its end, so
// that a file and a variable of the same text give the same secret. Throws BadInput, with `source`, if
// nothing is left, or if the text has a NUL byte or more than 4096 bytes.
std::string checked_secret(const std::string& source, std::string text);

// Returns the checked secret of GRADWIRE_SECRET or GRADWIRE_SECRET_FILE; "" if neither variable is set.
// Throws BadInput for an invalid secret, and for a file that is unreadable or readable by other users.
std::string secret_from_environment();

// Returns 32 unpredictable characters for use as a secret.
std::string random_secret();

}  // namespace gradwire
