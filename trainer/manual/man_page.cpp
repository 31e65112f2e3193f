#include "trainer/manual/man_page.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "runtime/util/version.h"

namespace gradwire {
namespace {

// Escapes text for troff. A line must not begin with a dot or an apostrophe, which begin requests.
std::string escaped(const std::string& text) {
  std::string out;
  for (char c : text) {
    if ((c == '.' || c == '\'') && (out.empty() || out.back() == '\n')) out += "\\&";
    if (c == '\\') {
      out += "\\e";
    } else if (c == '-') {
      out += "\\-";
    } else {
      out += c;
    }
  }
  return out;
}

std::string title(const std::string& name, const std::string& about) {
  std::string capitals = name, first = about;
  for (char& c : capitals) c = static_cast<char>(std::toupper(static_cast<unsigned char>(c)));
  if (!first.empty()) first[0] = static_cast<char>(std::tolower(static_cast<unsigned char>(first[0])));
  if (first.ends_with('.')) first.pop_back();
  return fmt::format(".TH {} 1 \"\" \"Gradwire " GRADWIRE_VERSION
                     "\" \"Gradwire's manual\"\n.SH NAME\n{} \\- {}\n",
                     escaped(capitals), escaped(name), escaped(first));
}

std::string described(const Argument& argument) {
  std::vector<std::string> names;
  for (const std::string& name : argument.names) names.push_back(fmt::format("\\fB{}\\fR", escaped(name)));
  std::string text = fmt::format(".TP\n{}", fmt::join(names, ", "));
  if (argument.value != Argument::Value::none) {
    text += fmt::format("{}\\fI{}\\fR", names.empty() ? "" : " ", escaped(argument.type));
  }
  text += fmt::format("\n{}", escaped(argument.about));
  if (argument.value == Argument::Value::words) {
    text += fmt::format("\n.br\nOne of {}.", escaped(fmt::format("{}", fmt::join(argument.words, ", "))));
  }
  if (!argument.preset.empty()) text += fmt::format("\n.br\nDefault: {}.", escaped(argument.preset));
  return text + (argument.repeats ? "\n.br\nMay be given more than once.\n" : "\n");
}

// Returns the arguments by group, in the order of --help.
std::string options(const Command& command) {
  std::vector<std::string> groups;
  for (const Argument& argument : command.arguments) {
    if (std::find(groups.begin(), groups.end(), argument.group) == groups.end()) {
      groups.push_back(argument.group);
    }
  }
  std::string text = ".SH OPTIONS\n";
  for (const std::string& group : groups) {
    if (groups.size() > 1) text += fmt::format(".SS {}\n", escaped(group));
    for (const Argument& argument : command.arguments) {
      if (argument.group == group) text += described(argument);
    }
  }
  return text;
}

// Returns the words after the program's name: "train [OPTIONS]", "report [OPTIONS] FILE...".
std::string synopsis(const Command& command) {
  std::string text = " [\\fIOPTIONS\\fR]";
  for (const Argument& argument : command.arguments) {
    if (!argument.names.empty()) continue;
    text += fmt::format(" \\fI{}\\fR{}", escaped(argument.type), argument.repeats ? "..." : "");
  }
  return text;
}

std::string page(const std::string& program, const Command& command) {
  std::string text = title(program + "-" + command.name, command.about);
  text += fmt::format(".SH SYNOPSIS\n\\fB{} {}\\fR{}\n.SH DESCRIPTION\n{}.\n", escaped(program),
                      escaped(command.name), synopsis(command), escaped(command.about));
  text += options(command);
  if (!command.footer.empty()) text += fmt::format(".SH EXAMPLES\n.nf\n{}\n.fi\n", escaped(command.footer));
  return text + fmt::format(".SH SEE ALSO\n.BR {} (1)\n", escaped(program));
}

std::string overview(const std::vector<Command>& commands) {
  const Command& program = commands[0];
  std::string text = title(program.name, program.about);
  text += fmt::format(
      ".SH SYNOPSIS\n\\fB{}\\fR \\fICOMMAND\\fR [\\fIOPTIONS\\fR]\n.SH DESCRIPTION\n{}\n.SH COMMANDS\n",
      escaped(program.name), escaped(program.about));
  for (size_t i = 1; i < commands.size(); ++i) {
    text += fmt::format(".TP\n.BR {}\\-{} (1)\n{}.\n", escaped(program.name), escaped(commands[i].name),
                        escaped(commands[i].about));
  }
  text += options(program);
  return text +
         ".SH EXIT STATUS\n0 for success, 1 for a failure while running, 2 for bad input, "
         "3 after training that has diverged, 128 + N after signal N.\n"
         "Codes 1 and 2 come with one line on standard error.\n"
         ".SH ENVIRONMENT\n\\fBgradwire doctor \\-\\-environment\\fR lists every variable.\n";
}

}  // namespace

std::vector<ManPage> man_pages(const std::vector<Command>& commands) {
  const std::string& program = commands[0].name;
  std::vector<ManPage> pages{{program + ".1", overview(commands)}};
  for (size_t i = 1; i < commands.size(); ++i) {
    pages.push_back({fmt::format("{}-{}.1", program, commands[i].name), page(program, commands[i])});
  }
  return pages;
}

}  // namespace gradwire
