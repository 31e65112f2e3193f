// The subcommands of gradwire-bench. Each add_ function registers one; when it was chosen, its callback runs
// and leaves the process's exit code (0 done, 1 failed) in `exit_code`. Bad input is thrown as BadInput.
#pragma once

#include <CLI/CLI.hpp>

namespace gradwire::bench {

void add_hook(CLI::App& app, int& exit_code);
void add_kernels(CLI::App& app, int& exit_code);
void add_schedules(CLI::App& app, int& exit_code);

}  // namespace gradwire::bench
