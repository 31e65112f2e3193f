#include "trainer/log/table.h"

#include <fmt/format.h>

#include <algorithm>

namespace gradwire {

std::string table_text(const Table& table, const std::string& indent, bool rule) {
  std::vector<size_t> widths;
  for (const auto& row : table) {
    widths.resize(std::max(widths.size(), row.size()));
    for (size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], row[i].size());
  }
  std::string text;
  for (const auto& row : table) {
    std::string line = indent;
    for (size_t i = 0; i < row.size(); ++i) {
      const std::string pad(widths[i] - row[i].size(), ' ');
      line += i == 0 ? row[i] + pad : "  " + pad + row[i];
    }
    line.erase(line.find_last_not_of(' ') + 1);
    text += line + "\n";
    if (rule && &row == &table.front()) {
      line = indent;
      for (size_t i = 0; i < widths.size(); ++i) line += (i == 0 ? "" : "  ") + std::string(widths[i], '-');
      text += line + "\n";
    }
  }
  return text;
}

std::string row_text(const std::string& name, const std::string& value) {
  return fmt::format("  {:<17} {}\n", name, value);
}

}  // namespace gradwire
