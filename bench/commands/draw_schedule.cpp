#include "bench/commands/draw_schedule.h"

#include <fmt/format.h>

#include <algorithm>
#include <functional>

namespace gradwire::bench {
namespace {

std::string cell(const Step& step) {
  const char* mark = step.kind == Step::Kind::send ? ">" : step.kind == Step::Kind::recv_reduce ? "+" : "=";
  const std::string text = fmt::format("{}{}{}", step.chunk, mark, step.peer);
  return step.intra_node ? fmt::format("({})", text) : text;
}

void end_line(std::string& text) {
  while (!text.empty() && text.back() == ' ') text.pop_back();
  text += '\n';
}

// Returns the tree along which ranks receive the result of `chunk`, from its owner down.
std::string draw_tree(const Schedule& s, int chunk) {
  std::vector<std::vector<int>> children(s.world);
  std::vector<bool> is_root(s.world, true);
  for (int r = 0; r < s.world; ++r) {
    for (const Round& round : s.rounds[r]) {
      for (const Step& step : round) {
        if (step.chunk != chunk || step.kind != Step::Kind::recv_copy) continue;
        children[step.peer].push_back(r);
        is_root[r] = false;
      }
    }
  }
  std::string text;
  std::function<void(int, const std::string&)> below = [&](int node, const std::string& indent) {
    for (size_t i = 0; i < children[node].size(); ++i) {
      bool last = i + 1 == children[node].size();
      text += fmt::format("{}{}{}\n", indent, last ? "`- " : "|- ", children[node][i]);
      below(children[node][i], indent + (last ? "   " : "|  "));
    }
  };
  for (int r = 0; r < s.world; ++r) {
    if (!is_root[r]) continue;
    text += fmt::format("  {}\n", r);
    below(r, "  ");
  }
  return text;
}

}  // namespace

std::string draw(const Schedule& s) {
  auto counted = [](int n, const char* unit) { return fmt::format("{} {}{}", n, unit, n == 1 ? "" : "s"); };
  std::string text =
      fmt::format("{}: {}, {}, {}, {}\n", name(s.kind), counted(s.world, "rank"), counted(s.chunks, "chunk"),
                  counted(s.num_rounds(), "round"), counted(s.lossy_steps, "lossy step"));
  if (s.kind == ScheduleKind::hierarchical) {
    text += fmt::format("{} of {}; {} with the wire format between nodes only\n", counted(s.nodes, "node"),
                        counted(s.per_node, "rank"), counted(s.inter_node_lossy_steps, "lossy step"));
  }
  text +=
      "c>r: send chunk c to rank r   c+r: add chunk c from rank r   c=r: copy chunk c's result from rank r";
  if (s.kind == ScheduleKind::hierarchical) text += "   (in brackets: inside a node)";
  text += "\n\n";

  auto rank_title = [](int r) { return fmt::format("rank {}", r); };
  size_t width = 0;
  for (int r = 0; r < s.world; ++r) width = std::max(width, rank_title(r).size());
  for (const auto& rounds : s.rounds) {
    for (const Round& round : rounds) {
      for (const Step& step : round) width = std::max(width, cell(step).size());
    }
  }
  width += 2;
  const size_t margin = std::max<size_t>(8, fmt::formatted_size("round {}", s.num_rounds()) + 2);
  std::string line(margin, ' ');
  for (int r = 0; r < s.world; ++r) line += fmt::format("{:<{}}", rank_title(r), width);
  end_line(line);
  text += line;
  for (int k = 0; k < s.num_rounds(); ++k) {
    // Sends first, then receives.
    std::vector<Round> column(s.world);
    size_t lines = 1;
    for (int r = 0; r < s.world; ++r) {
      column[r] = s.rounds[r][k];
      std::stable_partition(column[r].begin(), column[r].end(),
                            [](const Step& step) { return step.kind == Step::Kind::send; });
      lines = std::max(lines, column[r].size());
    }
    for (size_t i = 0; i < lines; ++i) {
      line = fmt::format("{:<{}}", i == 0 ? fmt::format("round {}", k + 1) : "", margin);
      for (int r = 0; r < s.world; ++r) {
        line += fmt::format("{:<{}}", i < column[r].size() ? cell(column[r][i]) : "", width);
      }
      end_line(line);
      text += line;
    }
  }
  if (s.kind == ScheduleKind::tree && s.world > 1) {
    for (int chunk = 0; chunk < s.chunks; ++chunk) {
      text += fmt::format("\ntree of chunk {}\n{}", chunk, draw_tree(s, chunk));
    }
  }
  return text;
}

}  // namespace gradwire::bench
