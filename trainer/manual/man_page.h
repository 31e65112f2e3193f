// Man pages, in troff.
#pragma once

#include <string>
#include <vector>

#include "trainer/manual/arguments.h"

namespace gradwire {

struct ManPage {
  std::string file;  // "gradwire-train.1"
  std::string text;
};
// Returns the pages of the program `commands[0]`: an overview, and a page for each command.
std::vector<ManPage> man_pages(const std::vector<Command>& commands);

}  // namespace gradwire
