#include "trainer/manual/completion.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

namespace gradwire {
namespace {

// Returns the name of a shell function: gradwire-bench -> _gradwire_bench.
std::string function_name(const std::string& program) {
  std::string name = "_" + program;
  std::replace(name.begin(), name.end(), '-', '_');
  return name;
}

std::vector<std::string> flags_of(const Command& command) {
  std::vector<std::string> all;
  for (const Argument& argument : command.arguments) {
    all.insert(all.end(), argument.names.begin(), argument.names.end());
  }
  return all;
}

const Argument* positional_of(const Command& command) {
  for (const Argument& argument : command.arguments) {
    if (argument.names.empty()) return &argument;
  }
  return nullptr;
}

// Returns the bash statements that set `words` or `kind` for a value.
std::string bash_value(const Argument& argument) {
  switch (argument.value) {
    case Argument::Value::words:
      return fmt::format("words=\"{}\"", fmt::join(argument.words, " "));
    case Argument::Value::spec:
      return "kind=spec";
    case Argument::Value::file:
      return "kind=file";
    case Argument::Value::folder:
      return "kind=folder";
    default:
      return "kind=other";
  }
}

// Returns a case for each command and flag with a value. Commands share most of their flags.
std::string bash_values(const std::vector<Command>& commands) {
  std::vector<std::pair<std::string, std::string>> cases;  // patterns, statements
  for (const Command& command : commands) {
    const std::string prefix = &command == &commands[0] ? "" : command.name;
    for (const Argument& argument : command.arguments) {
      if (argument.value == Argument::Value::none) continue;
      const std::string statement = bash_value(argument);
      for (const std::string& name : argument.names) {
        const std::string pattern = fmt::format("\"{} {}\"", prefix, name);
        const auto same =
            std::find_if(cases.begin(), cases.end(), [&](const auto& c) { return c.second == statement; });
        if (same == cases.end()) {
          cases.emplace_back(pattern, statement);
        } else {
          same->first += " | " + pattern;
        }
      }
    }
  }
  std::string text;
  for (const auto& [patterns, statement] : cases)
    text += fmt::format("    {})\n      {} ;;\n", patterns, statement);
  return text;
}

std::string bash_commands(const std::vector<Command>& commands) {
  std::string text;
  std::vector<std::string> names;
  for (const Command& command : commands) {
    if (&command == &commands[0]) continue;
    names.push_back(command.name);
    const Argument* positional = positional_of(command);
    text += fmt::format("      {}) flags=\"{}\" {} ;;\n", command.name, fmt::join(flags_of(command), " "),
                        positional == nullptr ? "kind=other" : bash_value(*positional));
  }
  return text + fmt::format("      *) flags=\"{}\" words=\"{}\" ;;\n", fmt::join(flags_of(commands[0]), " "),
                            fmt::join(names, " "));
}

bool has_specs(const std::vector<Command>& commands) {
  return std::any_of(commands.begin(), commands.end(), [](const Command& command) {
    return std::any_of(command.arguments.begin(), command.arguments.end(),
                       [](const Argument& a) { return a.value == Argument::Value::spec; });
  });
}

// Returns the function that prints the words of a spec: names or, after NAME:, its options. Works in bash and
// zsh.
std::string spec_function(const std::string& function) {
  const SpecWords specs = spec_words();
  std::vector<std::string> names;
  std::string cases;
  for (const auto& [name, options] : specs.by_name) {
    names.push_back(name);
    if (!options.empty())
      cases += fmt::format("    {}:*) choices{}=\" {}\" ;;\n", name, name == kAutomatic ? "" : "+",
                           fmt::join(options, " "));
  }
  return fmt::format(
      R"(# Prints the words that can follow in a compression spec.
{}_specs() {{
  local choices="{}" start word
  case $1 in
{}  esac
  case $1 in
    *:*) ;;
    *) echo "{}"; return ;;
  esac
  start=${{1%"${{1##*[:,]}}"}}
  for word in $(echo $choices); do echo "$start$word"; done
}}

)",
      function, fmt::join(specs.common, " "), cases, fmt::join(names, " "));
}

// Escapes a text inside the single quotes of an argument of zsh's _arguments or _describe.
std::string zsh_text(const std::string& text) {
  std::string out;
  for (char c : text) {
    if (c == '\'') {
      out += "'\\''";
    } else if (c == '[' || c == ']' || c == ':' || c == '\\') {
      out += std::string("\\") + c;
    } else {
      out += c == '\n' ? ' ' : c;
    }
  }
  return out;
}

std::string zsh_action(const Argument& argument, const std::string& function) {
  switch (argument.value) {
    case Argument::Value::words: {
      std::vector<std::string> words;
      for (const std::string& word : argument.words) words.push_back(zsh_text(word));
      return fmt::format("({})", fmt::join(words, " "));
    }
    case Argument::Value::spec:
      return fmt::format("{{ compadd -S \"\" -- $({}_specs \"$PREFIX\") }}", function);
    case Argument::Value::file:
      return "_files";
    case Argument::Value::folder:
      return "_files -/";
    default:
      return " ";
  }
}

std::string zsh_argument(const Argument& argument, const std::string& function) {
  const std::string value = fmt::format(":{}:{}", argument.type, zsh_action(argument, function));
  if (argument.names.empty()) return fmt::format(" \\\n        '*{}'", value);
  std::string text;
  for (const std::string& name : argument.names) {
    const bool has_value = argument.value != Argument::Value::none;
    text += fmt::format(" \\\n        '{}{}{}[{}]{}'", argument.repeats ? "*" : "", name,
                        has_value && name.starts_with("--") ? "=" : "", zsh_text(argument.about),
                        has_value ? value : "");
  }
  return text;
}

}  // namespace

std::string bash_completion(const std::vector<Command>& commands) {
  const std::string& program = commands[0].name;
  const std::string function = function_name(program);
  return fmt::format(
      R"(# Completion of {0} for bash, written by `{0} completion bash`.
{1}# Sets words or kind for the value of flag $2 of command $1.
{2}_value() {{
  case "$1 $2" in
{3}    *) return 1 ;;
  esac
}}

{2}() {{
  local line=${{COMP_LINE:0:COMP_POINT}} command="" flags="" words="" kind="" word current previous breaks start=""
  local -a typed
  # Bash also splits words at = and :, which are part of values. So split the line again.
  read -ra typed < <(printf '%s\n' "$line")
  [[ $line == *[[:space:]] ]] && typed+=("")
  current=${{typed[-1]}} previous=${{typed[-2]}} COMPREPLY=()
  for word in "${{typed[@]:1:${{#typed[@]}}-2}}"; do
    case $word in
      {4}) command=$word; break ;;
    esac
  done
  if [[ $current == --*=* ]]; then
    previous=${{current%%=*}} current=${{current#*=}}
  fi
  if ! {2}_value "$command" "$previous"; then
    case $command in
{5}    esac
    [[ $current == -* ]] && words=$flags kind=""
  fi
  case $kind in
    file) mapfile -t COMPREPLY < <(compgen -f -- "$current"); compopt -o filenames 2> /dev/null ;;
    folder) mapfile -t COMPREPLY < <(compgen -d -- "$current"); compopt -o filenames 2> /dev/null ;;
    spec) words=$({2}_specs "$current") ;;&
    *) mapfile -t COMPREPLY < <(compgen -W "$words" -- "$current") ;;
  esac
  [[ ${{#COMPREPLY[@]}} -eq 1 && ${{COMPREPLY[0]}} == *[=:] ]] && compopt -o nospace 2> /dev/null
  # Bash replaces only the part of the word after the last = or :.
  breaks=${{COMP_WORDBREAKS//[^=:]/}}
  [[ -n $breaks ]] && start=${{current%"${{current##*[$breaks]}}"}}
  COMPREPLY=("${{COMPREPLY[@]#"$start"}}")
}}

complete -F {2} {0}
)",
      program, has_specs(commands) ? spec_function(function) : "", function, bash_values(commands),
      [&] {
        std::vector<std::string> names;
        for (size_t i = 1; i < commands.size(); ++i) names.push_back(commands[i].name);
        return fmt::format("{}", fmt::join(names, " | "));
      }(),
      bash_commands(commands));
}

std::string zsh_completion(const std::vector<Command>& commands) {
  const std::string& program = commands[0].name;
  const std::string function = function_name(program);
  std::string names, cases, flags;
  for (const Argument& argument : commands[0].arguments) flags += zsh_argument(argument, function);
  for (size_t i = 1; i < commands.size(); ++i) {
    std::string arguments;
    for (const Argument& argument : commands[i].arguments) arguments += zsh_argument(argument, function);
    names += fmt::format("    '{}:{}'\n", commands[i].name, zsh_text(commands[i].about));
    cases += fmt::format("      {}) _arguments{} ;;\n", commands[i].name, arguments);
  }
  return fmt::format(
      R"(#compdef {0}
# Completion of {0} for zsh, written by `{0} completion zsh`.
{1}{2}() {{
  local context state state_descr line
  typeset -A opt_args
  local -a commands=(
{3}  )
  _arguments -C{4} \
        '1:command:->command' '*::argument:->argument'
  case $state in
    command) _describe command commands ;;
    argument) case $line[1] in
{5}    esac ;;
  esac
}}

if [ "$funcstack[1]" = "{2}" ]; then
  {2} "$@"
else
  compdef {2} {0}
fi
)",
      program, has_specs(commands) ? spec_function(function) : "", function, names, flags, cases);
}

}  // namespace gradwire
