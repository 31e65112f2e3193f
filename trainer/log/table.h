// Text tables and report lines.
#pragma once

#include <string>
#include <vector>

namespace gradwire {

using Table = std::vector<std::vector<std::string>>;  // rows of cells; the first is the heading

// Lines that start with `indent`; the first column is flush left, the others flush right; with `rule`, dashes
// under the heading.
std::string table_text(const Table& table, const std::string& indent = "  ", bool rule = false);

// One line of a report: "  name              value".
std::string row_text(const std::string& name, const std::string& value);

}  // namespace gradwire
