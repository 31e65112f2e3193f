// Text tables and report lines.
#pragma once

#include <string>
#include <vector>

namespace gradwire {

using Table = std::vector<std::vector<std::string>>;  // rows of cells; the first row is the heading

// Returns lines that start with `indent`. The first column is aligned left, the other columns right. If
// `rule`, adds dashes under the heading.
std::string table_text(const Table& table, const std::string& indent = "  ", bool rule = false);

// Returns one line of a report: "  name              value".
std::string row_text(const std::string& name, const std::string& value);

}  // namespace gradwire
