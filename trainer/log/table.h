// Columns of text for people.
#pragma once

#include <string>
#include <vector>

namespace gradwire {

using Table = std::vector<std::vector<std::string>>;  // rows of cells; the first is the heading

// Lines that begin with `indent`; the first column flush left, the others flush right; with `rule`, dashes under
// the heading.
std::string table_text(const Table& table, const std::string& indent = "  ", bool rule = false);

}  // namespace gradwire
