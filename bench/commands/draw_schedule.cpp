#include "bench/commands/draw_schedule.h"

#include <algorithm>
#include <functional>

namespace gradwire::bench {
namespace {

std::string cell(const Step& step) {
  const char* mark = step.kind == Step::Kind::send ? ">" : step.kind == Step::Kind::recv_reduce ? "+" : "=";
  std::string text = std::to_string(step.chunk) + mark + std::to_string(step.peer);
  return step.intra_node ? "(" + text + ")" : text;
}

std::string padded(std::string text, size_t width) {
  text.resize(std::max(width, text.size()), ' ');
  return text;
}

void end_line(std::string& text) {
  while (!text.empty() && text.back() == ' ') text.pop_back();
  text += '\n';
}

// Who gets the result of `chunk` from whom, from its owner down.
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
      text += indent + (last ? "`- " : "|- ") + std::to_string(children[node][i]) + "\n";
      below(children[node][i], indent + (last ? "   " : "|  "));
    }
  };
  for (int r = 0; r < s.world; ++r) {
    if (!is_root[r]) continue;
    text += "  " + std::to_string(r) + "\n";
    below(r, "  ");
  }
  return text;
}

}  // namespace

std::string draw(const Schedule& s) {
  auto counted = [](int n, const std::string& unit) {
    return std::to_string(n) + " " + unit + (n == 1 ? "" : "s");
  };
  std::string text = std::string(name(s.kind)) + ": " + counted(s.world, "rank") + ", " +
                     counted(s.chunks, "chunk") + ", " + counted(s.num_rounds(), "round") + ", " +
                     counted(s.lossy_steps, "lossy step") + "\n";
  if (s.kind == ScheduleKind::hierarchical) {
    text += counted(s.nodes, "node") + " of " + counted(s.per_node, "rank") + "; " +
            counted(s.inter_node_lossy_steps, "lossy step") + " with the wire format between nodes only\n";
  }
  text +=
      "c>r: send chunk c to rank r   c+r: add chunk c from rank r   c=r: copy chunk c's result from rank r";
  if (s.kind == ScheduleKind::hierarchical) text += "   (in brackets: inside a node)";
  text += "\n\n";

  size_t width = 0;
  for (int r = 0; r < s.world; ++r) width = std::max(width, ("rank " + std::to_string(r)).size());
  for (const auto& rounds : s.rounds) {
    for (const Round& round : rounds) {
      for (const Step& step : round) width = std::max(width, cell(step).size());
    }
  }
  width += 2;
  const size_t margin = std::max<size_t>(8, ("round " + std::to_string(s.num_rounds())).size() + 2);
  std::string line(margin, ' ');
  for (int r = 0; r < s.world; ++r) line += padded("rank " + std::to_string(r), width);
  end_line(line);
  text += line;
  for (int k = 0; k < s.num_rounds(); ++k) {
    // Sends first, then what arrives.
    std::vector<Round> column(s.world);
    size_t lines = 1;
    for (int r = 0; r < s.world; ++r) {
      column[r] = s.rounds[r][k];
      std::stable_partition(column[r].begin(), column[r].end(),
                            [](const Step& step) { return step.kind == Step::Kind::send; });
      lines = std::max(lines, column[r].size());
    }
    for (size_t i = 0; i < lines; ++i) {
      line = padded(i == 0 ? "round " + std::to_string(k + 1) : "", margin);
      for (int r = 0; r < s.world; ++r) line += padded(i < column[r].size() ? cell(column[r][i]) : "", width);
      end_line(line);
      text += line;
    }
  }
  if (s.kind == ScheduleKind::tree && s.world > 1) {
    for (int chunk = 0; chunk < s.chunks; ++chunk) {
      text += "\ntree of chunk " + std::to_string(chunk) + "\n" + draw_tree(s, chunk);
    }
  }
  return text;
}

}  // namespace gradwire::bench
