// The subcommands of gradwire-bench. Each add_ function registers one. The chosen one's callback runs and
// sets `exit_code` (0 done, 1 failed). Bad input is thrown as BadInput.
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

// Default ranks per node of hierarchical schedules: the largest divisor up to 8 that gives more than one
// node; 0 when there is none.
int usual_per_node(int world);

}  // namespace gradwire::bench
