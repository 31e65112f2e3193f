// A run's secret: who knows it may join. docs/running.md is the user's guide.
#pragma once

#include <string>

namespace gradwire {

// GRADWIRE_SECRET, or what GRADWIRE_SECRET_FILE holds, without the line's end; empty if neither is set. Throws
// BadInput for a file that cannot be read, is empty, or that other users can read.
std::string secret_from_environment();

// GRADWIRE_INSECURE=1: ranks on several machines may do without a secret. Throws BadInput for another value.
bool insecure_by_environment();

// 32 characters that nobody can guess.
std::string random_secret();

}  // namespace gradwire
