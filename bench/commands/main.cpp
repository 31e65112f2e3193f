#include <algorithm>
#include <csignal>
#include <cstdio>
#include <exception>
#include <memory>
#include <string>
#include <system_error>
#include <vector>

#include "bench/harness/command.h"
#include "runtime/threads/thread.h"
#include "runtime/util/error.h"
#include "runtime/util/file.h"
#include "runtime/util/parse.h"
#include "runtime/util/signals.h"
#include "trainer/cli/flags.h"

namespace {

int fail(const std::string& what, int exit_code) {
  std::fflush(stdout);
  std::fprintf(stderr, "gradwire-bench: %s\n", what.c_str());
  return exit_code;
}

}  // namespace

// Makes the program exit with a message when memory runs out, also in static initializers.
[[gnu::constructor(101)]] static void prepare() {
  gradwire::exit_cleanly_without_memory("gradwire-bench");
}

int main(int argc, char** argv) {
  constexpr int kFailed = 1, kBadInput = 2, kNoReader = 128 + SIGPIPE;
  gradwire::prepare_standard_descriptors();
  gradwire::prepare_signals();
  CLI::App app{"Measures and proves Gradwire's parts.", "gradwire-bench"};
  app.set_version_flag("--version", "gradwire-bench " GRADWIRE_VERSION);
  app.require_subcommand(1);
  app.formatter(gradwire::help_formatter());
  app.footer(
      "gradwire-bench kernels --filter powersgd --max-size 16M --stop 50ms\n"
      "gradwire-bench formats --gradients dumped --json formats.json\n"
      "gradwire-bench collectives --ranks 4 --compression int8");
  try {
    using namespace gradwire::bench;
    std::vector<std::unique_ptr<Command>> commands;
    for (auto make : {make_collectives, make_compare, make_formats, make_hook, make_kernels, make_numerics,
                      make_orthonormalize, make_schedules, make_step}) {
      commands.push_back(make(app));
    }
    gradwire::check_paths(app);
    gradwire::check_command(app, argc > 1 ? argv[1] : "-");
    app.parse(argc, argv);
    const auto chosen = std::ranges::find_if(commands, &Command::chosen);
    const int exit_code = (*chosen)->run();
    if (std::fflush(stdout) != 0 || std::ferror(stdout) != 0) {
      if (gradwire::reader_is_gone()) return kNoReader;  // | head
      return fail("standard output could not be written: is its disk full?", kFailed);
    }
    return exit_code;
  } catch (const CLI::Success& success) {
    return app.exit(success);  // --help, --version
  } catch (const CLI::ParseError& error) {
    return fail(gradwire::parse_error_text(app, error), kBadInput);
  } catch (const gradwire::BadInput& error) {
    return fail(error.what(), kBadInput);
  } catch (const std::exception& error) {
    const auto* unwritten = dynamic_cast<const std::system_error*>(&error);
    if (unwritten != nullptr && unwritten->code() == std::errc::broken_pipe) return kNoReader;  // fmt::print
    return fail(gradwire::text_of(error), kFailed);
  }
}
