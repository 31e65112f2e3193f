// Says what is wrong with a command line.
#pragma once

#include <CLI/CLI.hpp>
#include <string>

namespace gradwire {

// Returns the message of an error of app.parse(): the flag or word that is wrong, and the remedy.
std::string parse_error_text(const CLI::App& app, const CLI::ParseError& error);

}  // namespace gradwire
