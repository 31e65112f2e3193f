// The subcommands of gradwire-bench. Each add_ function registers one. The callback of the chosen subcommand
// runs the subcommand and sets `exit_code` (0 for success, 1 for failure). Throws BadInput for bad input.
#pragma once

#include <CLI/CLI.hpp>
#include <string>

#include "trainer/cli/flags.h"

namespace gradwire::bench {

void add_collectives(CLI::App& app, int& exit_code);
void add_compare(CLI::App& app, int& exit_code);
void add_formats(CLI::App& app, int& exit_code);
void add_hook(CLI::App& app, int& exit_code);
void add_kernels(CLI::App& app, int& exit_code);
void add_numerics(CLI::App& app, int& exit_code);
void add_orthonormalize(CLI::App& app, int& exit_code);
void add_schedules(CLI::App& app, int& exit_code);
void add_step(CLI::App& app, int& exit_code);

// Adds --device: "auto" selects all devices. devices_for() parses the value.
inline CLI::Option* add_device(CLI::App& command, std::string& device) {
  return command.add_option("--device", device, "auto (all devices), host or cuda")
      ->check(CLI::IsMember({"auto", "host", "cuda"}));
}

inline CLI::Option* add_json(CLI::App& command, std::string& path,
                             const std::string& about = "Write the table to FILE") {
  return command.add_option("--json", path, about)->type_name("FILE");
}

// Returns the default ranks per node of hierarchical schedules: the largest divisor up to 8 that gives more
// than one node; 0 if there is none.
int usual_per_node(int world);

}  // namespace gradwire::bench
