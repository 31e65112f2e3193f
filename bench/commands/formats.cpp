// gradwire-bench formats: the table of wire formats, as docs/formats.md has it.
#include <fmt/format.h>

#include <cstdio>

#include "bench/commands/commands.h"
#include "kernels/wire/formats.h"

namespace gradwire::bench {

void add_formats(CLI::App& app, int&) {
  CLI::App* command = app.add_subcommand("formats", "List the wire formats (as docs/formats.md does)");
  command->callback([] {
    fmt::print("| format | bytes per element | error | on the wire | source |\n|---|---|---|---|---|\n");
    for (Wire wire : wire_formats()) {
      fmt::print("| `{}{}` | {:.4g} | {} | {} | {} |\n", wire->name,
                 wire->stochastic ? "[:round=nearest\\|stochastic]" : "", wire->bytes_per_value(),
                 wire->exact ? "0" : fmt::format("{:.2g}", wire->gaussian_error), wire->summary,
                 wire->source);
    }
  });
}

}  // namespace gradwire::bench
