// The commands `completion` and `man` of a program, which print its completion scripts and man pages.
#pragma once

#include <CLI/CLI.hpp>

namespace gradwire {

// Adds `completion bash|zsh` and the hidden `man DIR`, which writes the man pages into a folder. Their
// callbacks run inside app.parse(), when all commands of `app` are known.
void add_manual_commands(CLI::App& app);
// Returns whether one of these commands ran.
bool ran_manual_command(const CLI::App& app);

}  // namespace gradwire
