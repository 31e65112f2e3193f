// The subcommands of gradwire-bench. Each add_ function registers one; when it was chosen, its callback runs
// and leaves the process's exit code (0 done, 1 failed) in `exit_code`. Bad input is thrown as BadInput.
#pragma once

#include <CLI/CLI.hpp>

namespace gradwire::bench {

void add_collectives(CLI::App& app, int& exit_code);
void add_formats(CLI::App& app, int& exit_code);
void add_hook(CLI::App& app, int& exit_code);
void add_kernels(CLI::App& app, int& exit_code);
void add_numerics(CLI::App& app, int& exit_code);
void add_orthonormalize(CLI::App& app, int& exit_code);
void add_schedules(CLI::App& app, int& exit_code);
void add_step(CLI::App& app, int& exit_code);

// Ranks per node of hierarchical schedules when none was asked for: the largest divisor up to 8 that leaves
// more than one node; 0 when there is none.
int usual_per_node(int world);

}  // namespace gradwire::bench
