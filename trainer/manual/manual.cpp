#include "trainer/manual/manual.h"

#include <fmt/format.h>

#include <cstdio>
#include <filesystem>
#include <memory>

#include "runtime/util/error.h"
#include "runtime/util/output_file.h"
#include "trainer/manual/completion.h"
#include "trainer/manual/man_page.h"

namespace gradwire {
namespace {

void print_completion(const CLI::App& app, const std::string& shell) {
  const std::vector<Command> commands = commands_of(app);
  std::fputs((shell == "bash" ? bash_completion(commands) : zsh_completion(commands)).c_str(), stdout);
}

void write_pages(const CLI::App& app, const std::string& folder) {
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  if (error) throw BadInput(fmt::format("{}: cannot be made: {}", folder, error.message()));
  for (const ManPage& page : man_pages(commands_of(app)))
    OutputFile(folder + "/" + page.file).write(page.text);
}

}  // namespace

void add_manual_commands(CLI::App& app) {
  CLI::App* completion = app.add_subcommand("completion",
                                            "Print a script that completes commands, flags "
                                            "and values in a shell");
  const auto shell = std::make_shared<std::string>();
  completion->add_option("SHELL", *shell, "The shell")
      ->type_name("")
      ->required()
      ->check(CLI::IsMember({"bash", "zsh"}));
  completion->footer(fmt::format("For the current shell:\n  source <({} completion bash)", app.get_name()));
  completion->callback([&app, shell] { print_completion(app, *shell); });
  CLI::App* man = app.add_subcommand("man", "Write the man pages into a folder")->group("");
  const auto folder = std::make_shared<std::string>();
  man->add_option("DIR", *folder, "The folder")->required();
  man->callback([&app, folder] { write_pages(app, *folder); });
}

bool ran_manual_command(const CLI::App& app) {
  return app.got_subcommand("completion") || app.got_subcommand("man");
}

}  // namespace gradwire
