// Completion scripts for shells.
#pragma once

#include <string>
#include <vector>

#include "trainer/manual/arguments.h"

namespace gradwire {

// Return the script that completes the commands, flags and values of the program `commands[0]`.
std::string bash_completion(const std::vector<Command>& commands);
std::string zsh_completion(const std::vector<Command>& commands);

}  // namespace gradwire
