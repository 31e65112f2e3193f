#include "trainer/log/console.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>

#include "trainer/log/stragglers.h"
#include "trainer/log/table.h"

namespace gradwire {
namespace {

int terminal_columns(std::FILE* out) {
  winsize size{};
  if (ioctl(fileno(out), TIOCGWINSZ, &size) == 0 && size.ws_col > 0) return size.ws_col;
  return 80;
}

std::string percent(const std::optional<double>& fraction) {
  return fraction ? fmt::format("{:.2f} %", 100 * *fraction) : "-";
}

}  // namespace

std::string milliseconds(double ms) {
  return std::isnan(ms) ? "-" : fmt::format("{:.{}f}", ms, ms < 10 ? 2 : 1);
}

std::string human_bytes(double bytes) {
  const char* units[] = {"B", "kB", "MB", "GB", "TB"};
  size_t unit = 0;
  while (std::abs(bytes) >= 999.5 && unit + 1 < std::size(units)) {
    bytes /= 1000;
    ++unit;
  }
  if (unit == 0) return fmt::format("{:.0f} B", bytes);
  return fmt::format("{:.{}f} {}", bytes, bytes < 9.995 ? 2 : bytes < 99.95 ? 1 : 0, units[unit]);
}

std::string human_count(double count) {
  if (!std::isfinite(count)) return "-";
  std::string digits = fmt::format("{:.0f}", std::abs(count)), text;
  for (size_t i = 0; i < digits.size(); ++i) {
    if (i > 0 && (digits.size() - i) % 3 == 0) text += ',';
    text += digits[i];
  }
  return (count <= -0.5 ? "-" : "") + text;
}

std::string human_seconds(double seconds) {
  if (!std::isfinite(seconds) || seconds < 0) return "-";
  if (seconds < 59.95) return fmt::format("{:.1f} s", seconds);
  long whole = std::lround(seconds);
  if (whole < 3600) return fmt::format("{}:{:02}", whole / 60, whole % 60);
  return fmt::format("{}:{:02}:{:02}", whole / 3600, whole / 60 % 60, whole % 60);
}

Console::Console(const TrainConfig& config, ConsoleOptions options) : config_(config), options_(options) {}

Console::~Console() {
  erase_bar();
}

void Console::on_run(const RunInfo& info) {
  print(
      fmt::format("{}{}: {} parameters in {} tensors; {}; {}", config_.model.name,
                  config_.model.gelu == Gelu::exact ? "" : fmt::format(", {} GELU", name(config_.model.gelu)),
                  human_count(static_cast<double>(info.parameters)),
                  human_count(static_cast<double>(info.tensors)), config_.compression.to_string(),
                  info.buckets == 0 ? "one rank, nothing to send"
                                    : fmt::format("{} bucket{}, schedule {}", info.buckets,
                                                  info.buckets == 1 ? "" : "s", info.schedule)));
  if (info.buckets > 0 && config_.compression.schedule == ScheduleKind::automatic)
    print(fmt::format("Schedule: {}", info.schedule_reason));
  if (!info.slow_products.empty()) print(fmt::format("Warning: {}", info.slow_products));
  first_step_ = steps_done_ = info.first_step;
  start_ = Clock::now();
}

void Console::on_step(const StepRecord& step) {
  last_ = step;
  steps_done_ = step.step + 1;
  if (options_.terminal) {
    if (Clock::now() - drawn_ > std::chrono::milliseconds(100)) draw_bar();
    return;
  }
  if (steps_done_ % options_.log_every != 0 && steps_done_ != config_.steps && steps_done_ != 1) return;
  std::string wire;
  if (step.wire_bytes > 0) {
    wire = fmt::format("  sent {} ({:.2f}x)  waited {} ms", human_bytes(static_cast<double>(step.wire_bytes)),
                       static_cast<double>(step.dense_bytes) / static_cast<double>(step.wire_bytes),
                       milliseconds(step.exposed_comm_ms));
  }
  print(fmt::format("step {}/{}  loss {:.4f}  lr {:.2e}  {} ms  {} images/s{}", steps_done_, config_.steps,
                    step.loss, step.lr, milliseconds(step.step_ms), human_count(step.images_per_s), wire));
}

void Console::on_shrink(const ShrinkRecord& shrink) {
  std::string who = shrink.lost.empty() ? "Regrouped without losing a rank" : "";
  for (size_t i = 0; i < shrink.lost.size(); ++i) {
    const double norm = shrink.lost_residual_norms[i];
    who += fmt::format("{}rank {}", i == 0 ? "Lost " : ", ", shrink.lost[i]);
    if (norm > 0) who += fmt::format(" and its residual of norm {:.4g}", norm);
  }
  print(fmt::format("{}. {} step {} with {} rank{} ({}), {} images per step, after {}: {}", who,
                    shrink.goes_back ? "Returning to" : "Continuing after", shrink.step, shrink.ranks.size(),
                    shrink.ranks.size() == 1 ? "" : "s", fmt::join(shrink.ranks, ", "),
                    human_count(static_cast<double>(shrink.global_batch)), human_seconds(shrink.seconds),
                    shrink.why));
}

void Console::on_grow(const GrowRecord& grow) {
  print(fmt::format(
      "Rank{} {} joined. Continuing after step {} with {} ranks ({}), {} images per step, after {}",
      grow.joined.size() == 1 ? "" : "s", fmt::join(grow.joined, ", "), grow.step, grow.ranks.size(),
      fmt::join(grow.ranks, ", "), human_count(static_cast<double>(grow.global_batch)),
      human_seconds(grow.seconds)));
}

void Console::on_replan(const ReplanRecord& replan) {
  const bool same = replan.before == replan.after;
  print(fmt::format("Replanned after step {} in {}, because {}: {}{}; schedule {}, {} ms per step predicted",
                    replan.step, human_seconds(replan.seconds), replan.why, same ? "still " : "",
                    same ? replan.after : fmt::format("{} instead of {}", replan.after, replan.before),
                    replan.schedule, milliseconds(replan.predicted.parts.step_ms)));
}

void Console::on_eval(const EvalRecord& eval) {
  print(fmt::format("epoch {:.4g}  test loss {:.4f}  test accuracy {:.2f} %", eval.epoch, eval.test_loss,
                    100 * eval.test_accuracy));
  if (options_.terminal && steps_done_ < config_.steps) draw_bar();
}

void Console::print(const std::string& text) {
  erase_bar();
  std::fprintf(options_.out, "%s\n", text.c_str());
  std::fflush(options_.out);
}

void Console::draw_bar() {
  drawn_ = Clock::now();
  double done = static_cast<double>(steps_done_) / static_cast<double>(std::max<int64_t>(1, config_.steps));
  // The finished share of this process's steps. The first of these steps may follow a checkpoint.
  double share = static_cast<double>(steps_done_ - first_step_) /
                 static_cast<double>(std::max<int64_t>(1, config_.steps - first_step_));
  double elapsed = std::chrono::duration<double>(drawn_ - start_).count();
  std::string tail = fmt::format(" {:3.0f} %  step {}/{}  loss {:.4f}  {} images/s  {} left", 100 * done,
                                 steps_done_, config_.steps, last_.loss, human_count(last_.images_per_s),
                                 human_seconds(share > 0 ? elapsed / share - elapsed : NAN));
  int room = terminal_columns(options_.out) - static_cast<int>(options_.label.size() + tail.size()) - 3;
  std::string bar;
  if (room >= 8) {
    int width = std::min(room, 40), filled = static_cast<int>(std::lround(done * width));
    bar = fmt::format("[{:#<{}}{:.<{}}]", "", filled, "", width - filled);
  }
  show(options_.label + bar + tail);
}

void Console::erase_bar() {
  if (bar_size_ > 0) show("");
}

// Replaces the bar by `line`, cut to the terminal's width, so that it stays in one row. Overwrites the rest
// with blanks, because dumb terminals have no escape sequences.
void Console::show(std::string line) {
  const auto columns = static_cast<size_t>(std::max(1, terminal_columns(options_.out) - 1));
  size_t size = std::min(line.size(), columns);
  while (size < line.size() && size > 0 && (line[size] & 0xC0) == 0x80) --size;  // inside a character
  line.resize(size);
  line.resize(std::max(size, std::min(bar_size_, columns)), ' ');
  std::fprintf(options_.out, "\r%s%s", line.c_str(), size == 0 ? "\r" : "");
  std::fflush(options_.out);
  bar_size_ = size;
}

std::string summary_line(const RunSummary& summary) {
  std::string text = fmt::format("{} steps in {}: ", human_count(static_cast<double>(summary.steps)),
                                 human_seconds(summary.seconds));
  if (summary.test_accuracy) text += fmt::format("test accuracy {}, ", percent(summary.test_accuracy));
  text += fmt::format("loss {:.4f}, {} ms per step, {} images/s", summary.final_loss,
                      milliseconds(summary.step_ms), human_count(summary.images_per_s));
  text += fmt::format(", {:.3g} TFLOP/s per device", summary.tflops);
  if (summary.peak_fraction)
    text += fmt::format(", {:.0f} % of the measured peak", 100 * *summary.peak_fraction);
  if (summary.ratio) {
    text +=
        fmt::format(", {} sent per step and rank ({:.2f}x less than FP32), waited {} ms for it",
                    human_bytes(summary.wire_bytes), *summary.ratio, milliseconds(summary.exposed_comm_ms));
  }
  return text;
}

std::string prediction_text(const RunSummary& summary) {
  if (!summary.predicted) return "";
  const StepParts &p = summary.predicted->parts, &m = summary.measured;
  Table table{{"part of a step", "predicted ms", "measured ms", "error"}};
  auto add = [&](const char* part, double predicted, double measured) {
    const double error = 100 * (predicted / measured - 1);
    table.push_back({part, milliseconds(predicted), milliseconds(measured),
                     std::isfinite(error) ? fmt::format("{:+.0f} %", error) : "-"});
  };
  add("compute", p.compute_ms, m.compute_ms);
  add("kernels", p.kernels_ms, m.kernels_ms);
  add("links and sums", p.links_ms, m.links_ms);
  add("exposed", p.exposed_ms, m.exposed_ms);
  add("optimizer", p.optimizer_ms, m.optimizer_ms);
  add("step", p.step_ms, m.step_ms);
  return fmt::format(
      "Prediction against the medians of the run:\n{}The measured step is {} the predicted 90 % "
      "interval of {} to {} ms",
      table_text(table), summary.predicted->holds(m.step_ms) ? "inside" : "outside",
      milliseconds(summary.predicted->low_ms), milliseconds(summary.predicted->high_ms));
}

std::string straggler_text(const RunSummary& summary) {
  const auto found = find_straggler(summary.waited_s, summary.seconds);
  if (!found) return "";
  return fmt::format("Rank {} was the straggler: each other rank waited {} longer ({:.0f} % of the run)",
                     found->rank, human_seconds(found->behind_s), 100 * found->share);
}

std::string shares_text(const RunSummary& summary) {
  const StepShares& s = summary.shares;
  auto part = [](const char* what, double share) {
    return share < 0.0005 ? "" : fmt::format(", {} {:.1f} %", what, 100 * share);
  };
  const std::string parts = part("forward", s.forward) + part("backward", s.backward) +
                            part("waiting for communication", s.exposed_comm) +
                            part("optimizer", s.optimizer) + part("waiting for data", s.data) +
                            part("other", s.other);
  std::string text = fmt::format("Step time: {}", parts.empty() ? "not measured" : parts.substr(2));
  if (const auto hidden = s.hidden_of_comm()) {
    const std::string parallel = part("compression", s.compress) + part("communication", s.communicate) +
                                 part("decompression", s.decompress);
    text += fmt::format("\nIn parallel: {} of the step; {:.0f} % of that overlapped with backward",
                        parallel.empty() ? "nothing" : parallel.substr(2), 100 * *hidden);
  }
  return text;
}

}  // namespace gradwire
